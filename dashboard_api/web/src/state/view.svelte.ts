// Which page is shown, in which colours, and what time it is.
export const PAGES = ["jobs", "job", "nodes", "network", "compare", "payments", "mine", "control", "alerts"] as const;
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

function storedTheme(): Theme {
  try {
    return THEMES.find((each) => each === localStorage.getItem(THEME_KEY)) ?? "auto";
  } catch {
    return "auto";
  }
}

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
    try {
      localStorage.setItem(THEME_KEY, theme);
    } catch {
      // Without storage the choice lasts as long as the page.
    }
  }
}

export const view = new View();
