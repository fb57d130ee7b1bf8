// Charts of Plotly's: as they are told in the page, in its colours, with as many points as can be seen.

const POINTS = 1500; // that a curve is drawn with

/** Draw or redraw a chart. Its text, grid and background take their colours from the page's style. */
function plot(host, traces, layout, config) {
  const coarse = matchMedia("(pointer: coarse)").matches; // a finger scrolls the page, it does not zoom
  window.Plotly.react(
    host,
    traces,
    {
      autosize: false,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12 },
      margin: { l: 56, r: 12, t: 16, b: 40 },
      showlegend: false,
      hovermode: "closest",
      dragmode: coarse ? false : "zoom",
      uirevision: "kept",
      ...layout,
    },
    { displaylogo: false, displayModeBar: false, showTips: false, ...config },
  );
  host.querySelectorAll(".main-svg").forEach((svg) => svg.setAttribute("aria-hidden", "true")); // the label tells it
}

const axis = (title, more) => ({ title: { text: title, standoff: 8 }, zeroline: false, automargin: false, ...more });

/** The points of a curve within a range of x, or of each stretch of it the least and the greatest where they are many. */
function thin({ x, y }, from, to) {
  const first = Math.max(0, x.findIndex((v) => v >= from) - 1);
  const end = Math.min(x.length, x.findLastIndex((v) => v <= to) + 2);
  const stride = Math.ceil((end - first) / POINTS);
  if (stride < 3) return { x: x.slice(first, end), y: y.slice(first, end) };
  const kept = [];
  for (let i = first; i < end; i += stride) {
    let [least, most] = [i, i];
    for (let k = i; k < Math.min(end, i + stride); k++) {
      if (y[k] < y[least] || missing(y[least])) least = k;
      if (y[k] > y[most] || missing(y[most])) most = k;
    }
    kept.push(Math.min(least, most), Math.max(least, most));
  }
  return { x: kept.map((k) => x[k]), y: kept.map((k) => y[k]) };
}

for (const host of document.querySelectorAll(".chart:has(> script)")) {
  const { data, layout, height } = JSON.parse(host.firstElementChild.textContent);
  const long = data.some((trace) => trace.type === "scatter" && trace.x.length > POINTS);
  const fit = (from, to) => data.map((trace) => thin(trace, from, to));
  let bound = !long;
  figure(host, (width) => {
    const drawn = long ? fit(-Infinity, Infinity).map((points, i) => ({ ...data[i], ...points })) : data;
    plot(host, drawn, { ...layout, width, height });
    if (!bound) host.on("plotly_relayout", (change) => {
      if (!Object.keys(change).some((key) => key.startsWith("xaxis."))) return; // seen closer, there is more to see
      const fitted = fit(...("xaxis.range[0]" in change ? host.layout.xaxis.range : [-Infinity, Infinity]));
      window.Plotly.restyle(host, { x: fitted.map((f) => f.x), y: fitted.map((f) => f.y) }, fitted.map((_, i) => i));
    });
    bound = true;
  }, { height, plotly: true });
}

startFigures();
