// The calculator of parallelism.md: bytes that a device sends in a step, along one axis.
(() => {
  const fields = [
    ["n", "devices n", 8], ["P", "parameters, billions", 5.3], ["L", "layers L", 103], ["d", "width d", 2048],
    ["S", "tokens in a batch S", 32768], ["M", "micro-batches M", 32], ["V", "chunks V", 1],
    ["R", "all-reduces a layer R", 4], ["a", "bytes of an activation", 2], ["p", "bytes of a gathered parameter", 2],
    ["g", "bytes of a gradient", 4], ["w", "link, GB/s", 50],
  ];
  const counts = ["n", "L", "d", "S", "M", "V"], form = document.getElementById("bytes-form");
  const fault = (name, label, text) => {
    const value = Number(text), isWhole = counts.includes(name) || name === "R";
    const expected = counts.includes(name) ? "a whole number from 1" : isWhole ? "a whole number from 0" : "a number above 0";
    const fits = text !== "" && (isWhole ? Number.isInteger(value) && value >= (name === "R" ? 0 : 1) : value > 0);
    return fits ? "" : text === "" ? `${label} is missing; use ${expected}. ` : `${label}: ${text} is impossible; use ${expected}. `;
  };
  for (const [name, label, value] of fields) {
    const row = document.createElement("label"), input = document.createElement("input");
    Object.assign(input, {type: "number", name, value, min: counts.includes(name) ? 1 : 0, step: "any"});
    row.append(label, input);
    form.append(row);
  }
  const show = () => {
    const x = Object.fromEntries([...form.querySelectorAll("input")].map(i => [i.name, Number(i.value)]));
    const wrong = fields.map(([name, label]) => fault(name, label, form.querySelector(`[name=${name}]`).value)).join("");
    document.getElementById("bytes-wrong").textContent = wrong;
    for (const id of ["bytes-sent", "bytes-bubble"]) document.getElementById(id).hidden = wrong !== "";
    if (wrong) return;
    const share = (x.n - 1) / x.n, P = x.P * 1e9;
    const boundary = x.S / x.M * x.d * x.a;
    const ticks = x.V * x.M + (x.V - 1) * x.n + 2 * (x.n - 1);
    const rows = [
      ["data", 2 * share * P * x.g],
      ['FSDP, gather="step"', share * P * (x.p + x.g)],
      ['FSDP, gather="use"', share * P * 3 * x.M * x.p],
      ["tensor, or sequence beside it", x.R * x.L * 2 * share * x.S * x.d * x.a],
      ["sequence, ring attention", x.L * 6 * share * x.S * x.d * x.a],
      ["pipeline", x.n > 1 ? 2 * ticks * boundary : 0],
    ];
    document.querySelector("#bytes-sent tbody").replaceChildren(...rows.map(([name, bytes]) => {
      const row = document.createElement("tr");
      for (const text of [name, (bytes / 1e9).toFixed(2), (bytes / x.w / 1e6).toFixed(1)]) {
        const cell = document.createElement("td");
        cell.textContent = text;
        row.append(cell);
      }
      return row;
    }));
    const bubble = (x.n - 1) / (x.V * x.M + x.n - 1);
    document.getElementById("bytes-bubble").textContent =
      `The pipeline's bubble with K = n = ${x.n}: ${(100 * bubble).toFixed(1)} %. A micro-batch's boundary: ${(boundary / 1e6).toFixed(2)} MB.`;
  };
  form.addEventListener("input", show);
  show();
})();
