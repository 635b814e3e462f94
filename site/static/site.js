// What scrolls inside itself can be reached, and scrolled, from the keyboard.
function reachable() {
  for (const box of document.querySelectorAll("pre, .formula, .table-wrapper, article dt.sig")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}
addEventListener("load", reachable);
addEventListener("resize", reachable);
