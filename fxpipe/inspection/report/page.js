// A folded table is compressed text until it is opened; then its elements replace that text.
for (const box of document.querySelectorAll("details")) {
  box.addEventListener("toggle", async () => {
    const folded = box.lastElementChild;
    if (!box.open || !folded.matches("script")) return;
    const bytes = Uint8Array.from(atob(folded.textContent), (char) => char.charCodeAt(0));
    const text = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const template = document.createElement("template");
    template.innerHTML = await new Response(text).text(); // escaped when the page was written
    folded.replaceWith(template.content); // if opened twice at once, the second finds nothing to replace
  });
}

// The whole timeline is `--zoom` times as wide as the visible part.
const view = document.querySelector(".view");
if (view) {
  const zoom = () => Number(view.style.getPropertyValue("--zoom"));
  const show = (wanted, middle = (view.scrollLeft + view.clientWidth / 2) / view.scrollWidth) => {
    view.style.setProperty("--zoom", Math.min(Math.max(1, wanted), 1000));
    view.scrollLeft = middle * view.scrollWidth - view.clientWidth / 2;
  };
  const acts = {
    first: () => show(Number(view.dataset.first), 0), all: () => show(1), in: () => show(zoom() * 2), out: () => show(zoom() / 2),
  };
  document.getElementById("zoom").addEventListener("click", (event) => acts[event.target.dataset.do]?.());
}
