import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig, type Plugin } from "vite";

// An exported page gets script and style within itself, so that its frame names neither.
const withoutParts: Plugin = {
  name: "without-parts",
  transformIndexHtml: {
    order: "post",
    handler: (html) => html.replace(/\s*<script type="module"[^>]*><\/script>|\s*<link rel="(?:stylesheet|icon)"[^>]*>/g, ""),
  },
  generateBundle: (_, bundle) => {
    delete bundle["page.svg"];
  },
};

// Hashes do not compress, and parts name each other by them: six characters tell builds apart.
const SHORT_NAMES = {
  entryFileNames: "assets/[name]-[hash:6].js",
  chunkFileNames: "assets/[name]-[hash:6].js",
  assetFileNames: "assets/[name]-[hash:6][extname]",
};

// Twice: in parts for the server, and by `--mode recorded` as one script and one style sheet, which
// an exported page holds within its single file.
export default defineConfig(({ mode }) => {
  const isWhole = mode === "recorded";
  return {
    base: "./",
    plugins: isWhole ? [svelte(), withoutParts] : [svelte()],
    build: {
      outDir: isWhole ? "../dist/recorded" : "../dist",
      emptyOutDir: true,
      target: "es2022",
      modulePreload: false,
      cssCodeSplit: false,
      assetsInlineLimit: isWhole ? 10_000 : 0,
      rollupOptions: isWhole
        ? { output: { inlineDynamicImports: true, entryFileNames: "page.js", assetFileNames: "page[extname]" } }
        : { output: SHORT_NAMES },
    },
    server: {
      proxy: {
        "/api": "http://127.0.0.1:7780",
        "/feed": { target: "ws://127.0.0.1:7780", ws: true },
      },
    },
  };
});
