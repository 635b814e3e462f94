// A JupyterLab extension, written as it is loaded: JupyterLab drops the alt text that an output's
// metadata holds for its picture, so a screen reader hears nothing. Where `dtlab lab` has opened the
// course, its prose stands in lines that can be read on a wide screen, code keeps its
// lines, and a chapter's first picture fits the first screen.
(window._JUPYTERLAB = window._JUPYTERLAB || {}).dtlab = (() => {
  let shared;
  const load = async name => (await Object.values(shared[name])[0].get())();

  const STYLE = `
    .dtlab-course .jp-Notebook .jp-MarkdownOutput > :not(pre, table) { max-width: 52em; }
    .dtlab-course .jp-Notebook-cell { max-width: 1180px; margin-left: auto; margin-right: auto; }
    .dtlab-course .jp-RenderedImage img { border-radius: 6px; }
    .dtlab-course .jp-RenderedMarkdown pre { white-space: pre; overflow-x: auto; }
    .dtlab-course .jp-RenderedText pre { word-break: normal; overflow-wrap: anywhere; }
    .dtlab-course .jp-Cell[data-windowed-list-index="1"] .jp-RenderedImage img {
      max-height: max(300px, calc(100vh - 390px)); width: auto; }
    .dtlab-course[data-jp-theme-light=false] :is(.jp-RenderedImage, .dtlab-explorer) img {
      border-radius: 6px; filter: brightness(.88); }
  `;

  async function plugin() {
    const {IRenderMimeRegistry, RenderedImage} = await load('@jupyterlab/rendermime');
    class DescribedImage extends RenderedImage {
      async render(model) {
        await super.render(model);
        const image = this.node.querySelector('img');
        if (image) image.alt = model.metadata[this.mimeType]?.alt ?? '';
      }
    }
    const createRenderer = options => new DescribedImage(options);
    return {
      id: 'dtlab:course',
      autoStart: true,
      requires: [IRenderMimeRegistry],
      activate: (app, registry) => {
        registry.addFactory({safe: true, mimeTypes: ['image/png'], createRenderer}, 89);
        const config = JSON.parse(document.getElementById('jupyter-config-data').textContent);
        if (config.dtlab) document.body.classList.add('dtlab-course');
        document.head.append(Object.assign(document.createElement('style'), {textContent: STYLE}));
      },
    };
  }

  return {
    init: async scope => { shared = scope; },
    get: async () => {
      const found = await plugin();
      return () => ({__esModule: true, default: found});
    },
  };
})();
