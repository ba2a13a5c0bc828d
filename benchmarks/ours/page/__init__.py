"""The page in a browser: a coordinator beneath it, Chromium in front of it."""
