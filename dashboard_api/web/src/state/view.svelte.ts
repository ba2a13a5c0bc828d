// Which page is shown, in which colours, and what time it is.
import { store, stored } from "../lib/storage";

export const PAGES = ["jobs", "job", "nodes", "network", "compare", "payments", "mine", "control", "alerts", "events"] as const;
export type PageName = (typeof PAGES)[number];
export type Theme = "auto" | "light" | "dark";

export interface Route {
  page: PageName;
  id: string;
}

export function parsedRoute(hash: string): Route {
  const [page = "", id = ""] = hash.replace(/^#\/?/, "").split("/");
  const known = PAGES.find((each) => each === page);
  return { page: known ?? "jobs", id: known ? decodeURIComponent(id) : "" };
}

export const link = (page: PageName, id = ""): string => `#/${page}${id ? `/${encodeURIComponent(id)}` : ""}`;

const THEME_KEY = "hypergpu.theme";
const THEMES: readonly Theme[] = ["auto", "light", "dark"];

const storedTheme = (): Theme => THEMES.find((each) => each === stored(THEME_KEY)) ?? "auto";

class View {
  route = $state.raw<Route>(parsedRoute(location.hash));
  theme = $state<Theme>(storedTheme());
  /** Changes when colours change: canvases draw again. */
  isDark = $state(false);
  now_ms = $state(Date.now());

  start(): void {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const paint = (): void => {
      this.isDark = this.theme === "dark" || (this.theme === "auto" && dark.matches);
      document.documentElement.dataset["theme"] = this.isDark ? "dark" : "light";
    };
    dark.addEventListener("change", paint);
    this.#paint = paint;
    paint();
    window.addEventListener("hashchange", () => {
      this.route = parsedRoute(location.hash);
      window.scrollTo(0, 0);
    });
    window.setInterval(() => (this.now_ms = Date.now()), 1000);
  }

  #paint: () => void = () => undefined;

  choose(theme: Theme): void {
    this.theme = theme;
    this.#paint();
    store(THEME_KEY, theme);
  }
}

export const view = new View();
