// Boxes of the shown page that are not where they should be, a sentence each.
() => {
  const faults = [];
  const named = (element) => {
    const text = (element.getAttribute("aria-label") ?? element.textContent ?? "").trim();
    return `<${element.localName}> "${text.slice(0, 60)}"`;
  };
  const wide = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > wide) {
    faults.push(`the document is ${document.documentElement.scrollWidth} px wide of ${wide}`);
  }
  // What scrolls or cuts off has its own inside; drawings have theirs.
  const clips = (element) => getComputedStyle(element).overflowX !== "visible";
  const isFixed = (element) => {
    for (let each = element; each; each = each.parentElement) {
      if (["sticky", "fixed"].includes(getComputedStyle(each).position)) return true;
    }
    return false;
  };
  const isHidden = (element) => !element.checkVisibility({ checkVisibilityCSS: true })
    || element.closest(".hidden, .skip, svg svg");
  const boundary = (element) => {
    for (let each = element.parentElement; each; each = each.parentElement) {
      if (each !== document.body && each !== document.documentElement && clips(each)) return null;
      if (each.matches(".card, [role=dialog]")) return each.getBoundingClientRect();
    }
    return { left: 0, right: wide };
  };
  const all = [...document.body.querySelectorAll("*:not(svg *):not(script):not(option)")]
    .filter((element) => !isHidden(element));
  for (const element of all) {
    const box = element.getBoundingClientRect();
    if (box.width === 0 || box.height === 0) continue;
    const bound = boundary(element);
    if (bound && (box.left < bound.left - 1 || box.right > bound.right + 1)) {
      faults.push(`${named(element)} spans ${Math.round(box.left)} to ${Math.round(box.right)} px,`
        + ` its card or window ${Math.round(bound.left)} to ${Math.round(bound.right)}`);
    }
  }
  const acting = all.filter((element) => element.matches(
    "a[href], button, input, select, textarea, summary"));
  for (const element of acting) {
    if (element.matches("button, a.button") && element.scrollWidth > element.clientWidth + 2) {
      faults.push(`${named(element)} is narrower than its text`);
    }
  }
  const visible = (element) => {
    const box = element.getBoundingClientRect();
    let [left, top, right, bottom] = [box.left, box.top, box.right, box.bottom];
    for (let each = element.parentElement; each; each = each.parentElement) {
      if (each === document.body || !clips(each)) continue;
      const within = each.getBoundingClientRect();
      [left, right] = [Math.max(left, within.left), Math.min(right, within.right)];
      [top, bottom] = [Math.max(top, within.top), Math.min(bottom, within.bottom)];
    }
    return { left, top, right, bottom };
  };
  const placed = acting.map((element) => [element, visible(element), isFixed(element)]);
  placed.forEach(([one, a, aFixed], place) => {
    for (const [other, b, bFixed] of placed.slice(place + 1)) {
      if (aFixed !== bFixed || one.contains(other)) continue;
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 1) faults.push(`${named(one)} and ${named(other)} overlap`);
    }
  });
  return faults;
}
