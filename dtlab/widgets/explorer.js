// Runs as the load handler of a <style> element (`this`) each time its widget comes onto the page:
// what ipywidgets has no trait for. Doing it twice does no harm.
const box = this.closest('.dtlab-explorer');
const set = (element, name, value) => {
  if (element && value && element.getAttribute(name) !== value) element.setAttribute(name, value);
};

// In JupyterLab's command mode, b inserts a cell and an arrow key goes to another one. Keys pressed
// in here mean something here; those that save or run are still the notebook's.
box.onkeydown = event => {
  if (event.key === 'Escape' && document.fullscreenElement === box) document.exitFullscreen();
  const forNotebook = event.ctrlKey || event.metaKey || (event.shiftKey && event.key === 'Enter');
  if (!forNotebook) event.stopPropagation();
};

// Names and values for screen readers: a slider over a list would read out places in that list.
const describe = () => {
  for (const slider of box.querySelectorAll('.widget-slider')) {
    const name = slider.querySelector('.widget-label')?.textContent;
    const readout = slider.querySelector('.widget-readout');
    const values = readout?.textContent.split(' – ') ?? [];
    const handles = [...slider.querySelectorAll('[role=slider]')];
    handles.forEach((handle, i) => {
      set(handle, 'aria-label', handles.length > 1 ? `${name}, ${i ? 'to' : 'from'}` : name);
      set(handle, 'aria-valuetext', values[i]);
    });
    if (readout?.isContentEditable) {
      set(readout, 'role', 'textbox');
      set(readout, 'aria-label', name);
    }
  }
  for (const play of box.querySelectorAll('.widget-play')) {
    ['play or pause', 'back to the start', 'repeat'].forEach((name, i) => {
      set(play.children[i], 'aria-label', name);
      set(play.children[i], 'title', name);
    });
  }
  for (const image of box.querySelectorAll('img')) set(image, 'alt', image.title);
  set(box.querySelector('.dtlab-words'), 'role', 'status');  // it stays; its text changes
};
describe();
box.describing?.disconnect();
box.describing = new MutationObserver(describe);
box.describing.observe(box, {subtree: true, childList: true, characterData: true,
                             attributeFilter: ['aria-valuetext', 'title']});

const full = box.querySelector('.dtlab-full-screen');
full.onclick = () =>
  document.fullscreenElement ? document.exitFullscreen() : box.requestFullscreen();
box.onfullscreenchange = () => {
  full.textContent = document.fullscreenElement === box ? 'leave full screen' : 'full screen';
};

// The words grow with their text and keep that height, so that the page does not jump back and forth.
const words = box.querySelector('.dtlab-words');
if (words) {
  box.growing?.disconnect();
  box.growing = new ResizeObserver(() => {
    if (!document.fullscreenElement) words.style.minHeight = getComputedStyle(words).height;
  });
  box.growing.observe(words);
}

// Run turns itself off while it works, and so loses the focus: Stop takes it, and gives it back.
const [run, stop] = ['.dtlab-run', '.dtlab-stop'].map(name => box.querySelector(name));
if (run && stop) {
  run.addEventListener('click', () => { box.focusOn = stop; });
  stop.addEventListener('click', () => { box.focusOn = run; });
  box.switching?.disconnect();
  box.switching = new MutationObserver(() => {
    if (box.focusOn === stop && stop.disabled && !run.disabled) box.focusOn = run;  // it ended
    const free = document.activeElement === document.body || [run, stop].includes(document.activeElement);
    if (box.focusOn && !box.focusOn.disabled && free) box.focusOn.focus();
  });
  for (const each of [run, stop]) box.switching.observe(each, {attributeFilter: ['disabled']});
}
