// A timeline on canvases: hover tells about an op, the wheel, the mouse and the keys move in time.
// It draws what `page_data` of drawing/page.py gives, and computes no time.
const LEFT = 46, TICKS = 24, GAP = 30;

// A colour of timeline.css as canvases take it; looked up once a drawing.
const probe = document.createElement("i"), colours = new Map();
function css(name) {
  if (!colours.size) { probe.hidden = true; document.body.append(probe); }
  if (!colours.has(name)) {
    probe.style.color = `var(${name})`;
    colours.set(name, getComputedStyle(probe).color);
  }
  return colours.get(name);
}
const short = (value, digits = 6) => String(Number(value.toPrecision(digits)));
function bytes(value) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (value >= 1024 && i < 4) { value /= 1024; i++; }
  return short(value, 3) + " " + names[i];
}
function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

class Picture {
  constructor(timeline, chart, index) {
    this.t = timeline;
    this.chart = chart;
    const d = chart;
    this.hasSyncs = d.kind.includes(this.t.data.syncKind);
    this.row = d.workers <= 8 ? 30 : d.workers <= 16 ? 24 : d.workers <= 64 ? 17 : 12;
    this.syncRow = this.hasSyncs ? Math.max(4, Math.round(this.row * 0.28)) : 0;
    this.pitch = this.row + this.syncRow;
    this.memoryRow = d.memory ? (d.workers <= 8 ? 30 : 15) : 0;
    // Boxes come sorted by worker, ops before syncs, by start: first[2w] to first[2w + 1] are worker w's ops.
    this.first = new Int32Array(2 * d.workers + 1).fill(d.start.length);
    for (let i = d.start.length - 1; i >= 0; i--) this.first[2 * d.worker[i] + (d.kind[i] === this.t.data.syncKind)] = i;
    for (let r = 2 * d.workers - 1; r >= 0; r--) this.first[r] = Math.min(this.first[r], this.first[r + 1]);
    this.users = {};
    d.needs.forEach((needs, i) => { for (const need of needs) (this.users[need] ||= []).push(i); });
    this.peakWidth = d.memory ? 14 + 7 * Math.max(4, ...d.memory.peaks.map(p => p.length)) : 20;
    this.index = index;
    this.build();
  }

  get right() { return Math.max(...this.t.pictures.map(p => p.peakWidth)); }
  get rowsHeight() { return this.chart.workers * this.pitch; }
  get memoryTop() { return this.rowsHeight + TICKS + GAP; }
  get height() {
    return this.rowsHeight + TICKS + 2 + (this.memoryRow ? GAP + this.chart.workers * this.memoryRow + TICKS : 0);
  }
  get plotWidth() { return Math.max(50, this.canvas.clientWidth - LEFT - this.right); }
  x(time) { return LEFT + (time - this.t.view.from) / (this.t.view.to - this.t.view.from) * this.plotWidth; }
  time(x) { return this.t.view.from + (x - LEFT) / this.plotWidth * (this.t.view.to - this.t.view.from); }

  build() {
    const section = make("section");
    const heading = make(this.t.level, "", this.chart.heading);
    section.append(heading, make("p", "", this.chart.summary), this.legend());
    this.canvas = make("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label",
      "Timeline of " + this.chart.heading + ": " + this.chart.summary + ". Keys n and p step through the ops" +
      (this.t.onMove ? "; [ and ] move the chosen one in its worker's order." : "."));
    this.canvas.style.height = this.height + "px";
    section.append(this.canvas, make("p", "split", this.chart.split));
    this.t.place.append(section);
    this.listen();
  }

  legend() {
    const list = make("ul", "legend"), d = this.chart;
    const shades = hue => d.kinds.map(kind => {
      const colour = hue[this.t.data.shades[kind]], band = this.t.data.bands[kind];
      return band === null ? colour : `linear-gradient(${colour} 75%, ${hue[band]} 75%)`;
    });
    const entry = (text, ...fills) => {
      const item = make("li"), swatch = make("span", "swatch");
      for (const fill of fills) {
        const part = make("i", /[#(]/.test(fill) ? "" : fill);
        if (!part.className) part.style.background = fill;
        swatch.append(part);
      }
      item.append(swatch, make("span", "", text));
      list.append(item);
    };
    if (d.legend.length === 1 && !d.legend[0][1]) entry(d.ways, ...shades(this.t.data.hues[d.legend[0][0]]));
    else {
      entry(d.ways, ...shades(this.t.data.neutral));
      for (const [hue, text] of d.legend) entry(text, ...shades(this.t.data.hues[hue]));
    }
    if (this.hasSyncs) {
      const [paper, line] = this.t.data.sync;
      const hatch = `repeating-linear-gradient(-45deg, ${line} 0 1px, ${paper} 1px 4px)`;
      entry("gradient sync", hatch, hatch);
    }
    entry("bubble", "bubble");
    if (d.steady) entry("steady part", "steady");
    return list;
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, width = this.canvas.clientWidth;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const g = this.g = this.canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, this.height);
    this.font = "12px " + getComputedStyle(document.body).fontFamily;
    this.frame(0, this.pitch, this.row);
    this.clipped(0, this.rowsHeight, () => { this.boxes(); this.steady(); this.messages(); this.related(); this.circle(); this.ghost(); });
    if (this.memoryRow) this.memory();
    if (this.t.cursor !== null && this.t.cursor >= this.t.view.from && this.t.cursor <= this.t.view.to) {
      g.fillStyle = css("--faint");
      g.fillRect(Math.round(this.x(this.t.cursor)), 0, 1, this.height - TICKS);
    }
  }

  clipped(top, height, body) {
    this.g.save();
    this.g.beginPath();
    this.g.rect(LEFT - 1, top, this.plotWidth + 2, height);
    this.g.clip();
    body();
    this.g.restore();
  }

  // Worker names, lines between rows, the end of the schedule, the time axis.
  frame(top, pitch, middle) {
    const g = this.g, d = this.chart, bottom = top + d.workers * pitch;
    const end = Math.min(this.x(d.makespan), LEFT + this.plotWidth);
    g.font = pitch < 14 ? this.font.replace("12px", "10px") : this.font;
    g.textBaseline = "middle";
    g.textAlign = "right";
    for (let w = 0; w < d.workers; w++) {
      if (pitch >= 11 || w % 2 === 0) {
        g.fillStyle = css("--ink");
        g.fillText(w, LEFT - 8, top + w * pitch + middle / 2 + 1);
      }
      if (w && end > LEFT) { g.fillStyle = css("--line"); g.fillRect(LEFT, top + w * pitch, end - LEFT, 1); }
    }
    g.fillStyle = css("--faint");
    g.fillRect(LEFT, bottom, this.plotWidth, 1);
    if (d.makespan >= this.t.view.from && d.makespan <= this.t.view.to) g.fillRect(this.x(d.makespan), top, 1, bottom - top);
    g.font = this.font.replace("12px", "11px");
    g.fillText("worker", LEFT - 8, bottom + 14);
    g.font = this.font;
    g.textAlign = "center";
    const span = (this.t.view.to - this.t.view.from) / this.t.unit[1], most = Math.max(2, this.plotWidth / 70);
    let step = Math.pow(10, Math.floor(Math.log10(span / most)));
    step *= [1, 2, 5, 10].find(f => span <= step * f * most) || 10;
    for (let i = Math.ceil(this.t.view.from / this.t.unit[1] / step - 1e-9); i * step <= this.t.view.to / this.t.unit[1] * (1 + 1e-12); i++) {
      const x = this.x(i * step * this.t.unit[1]), text = short(i * step, 10);
      g.fillStyle = css("--faint");
      g.fillRect(Math.round(x), bottom, 1, 4);
      g.fillStyle = css("--ink");
      g.fillText(text + ((i + 1) * step * this.t.unit[1] > this.t.view.to ? " " + this.t.unit[0] : ""), x, bottom + 14);
    }
  }

  boxes() {
    const g = this.g, d = this.chart, ink = this.t.data.ink, edge = css("--box-edge"), focus = css("--focus");
    const large = this.row < 20 ? 10.5 : 12, small = this.row < 20 ? 9 : 10;
    const fonts = new Map([large, small].map(size => [size, this.font.replace("12px", size + "px")]));
    const hatch = this.hatch(), scale = this.plotWidth / (this.t.view.to - this.t.view.from), start = LEFT - this.t.view.from * scale;
    g.textAlign = "center";
    let size = 0;
    for (let r = 0; r < 2 * d.workers; r++) {
      const sync = r % 2, top = (r >> 1) * this.pitch + (sync ? this.row - 1 : 2);
      const height = sync ? this.syncRow - 1 : this.row - 4;
      const last = this.first[r + 1];
      let drawn = -1;
      for (let i = this.after(r, this.t.view.from); i < last && d.start[i] < this.t.view.to; i++) {
        let left = start + d.start[i] * scale, right = start + d.end[i] * scale;
        const width = right - left;
        // What ends in the half pixel drawn last cannot be seen.
        if (2 * right < drawn) continue;
        const hue = sync ? null : this.t.data.hues[d.lanes[d.lane[i]][1]], shade = this.t.data.shades[d.kind[i]];
        if (width < 3) {
          // No room for an edge; what is shorter than half a pixel is drawn as that.
          g.fillStyle = sync ? this.t.data.sync[1] : hue[shade];
          g.fillRect(left, top, Math.max(width, 0.5), height);
          drawn = Math.floor(2 * left) + 1;
          continue;
        }
        left = Math.max(left, LEFT - 4); right = Math.min(right, LEFT + this.plotWidth + 4);
        const chosen = this.t.pointed && this.t.pointed.picture === this && this.t.pointed.box === i;
        g.fillStyle = chosen ? focus : edge;
        g.fillRect(left, top, right - left, height);
        const inset = chosen ? 2.5 : width < 8 ? 0.35 : 0.6;
        g.fillStyle = sync ? hatch : hue[shade];
        g.fillRect(left + inset, top + inset, right - left - 2 * inset, height - 2 * inset);
        const band = this.t.data.bands[d.kind[i]];
        if (band !== null) {
          const tall = Math.max(2, 0.16 * height);
          g.fillStyle = hue[band];
          g.fillRect(left + inset, top + height - inset - tall, right - left - 2 * inset, tall);
        }
        const label = d.texts[d.label[i]], room = (right - left - 2) / label.length;
        if (!sync && room >= 0.6 * small) {
          const fitting = room >= 0.6 * large ? large : small;
          if (fitting !== size) { size = fitting; g.font = fonts.get(size); }
          g.fillStyle = ink[shade];
          g.fillText(label, (left + right) / 2, top + height / 2 + 1);
        }
      }
    }
  }

  hatch() {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 5;
    const t = tile.getContext("2d");
    t.fillStyle = this.t.data.sync[0];
    t.fillRect(0, 0, 5, 5);
    t.strokeStyle = this.t.data.sync[1];
    for (const shift of [-5, 0, 5]) { t.moveTo(shift - 1, 6); t.lineTo(shift + 6, -1); }
    t.stroke();
    return this.g.createPattern(tile, "repeat");
  }

  // The first box of row r that ends after a time.
  after(r, time) {
    let low = this.first[r], high = this.first[r + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.chart.end[middle] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }

  // The outline of a box, and its middle.
  outline(i, colour) {
    const g = this.g, d = this.chart, left = this.x(d.start[i]), top = d.worker[i] * this.pitch + 2;
    g.strokeStyle = colour;
    g.lineWidth = 2.5;
    g.strokeRect(left + 1, top + 1, Math.max(2, this.x(d.end[i]) - left - 2), this.row - 6);
  }
  middle(i) { const d = this.chart; return [this.x((d.start[i] + d.end[i]) / 2), d.worker[i] * this.pitch + this.row / 2]; }

  // What the chosen op needs, and what needs it.
  related() {
    const p = this.t.pointed, d = this.chart;
    if (!p || p.picture !== this || p.box === undefined) return;
    for (const i of d.needs[p.box]) this.outline(i, css("--needs"));
    for (const i of this.users[p.box] || []) this.outline(i, css("--users"));
  }

  // Who waits for whom where the workers wait in a circle: from the op that waits to the one it waits for.
  circle() {
    for (const [waits, made] of this.chart.circle || []) {
      const colour = css("--wrong"), [x, y] = this.middle(waits), [u, v] = this.middle(made);
      this.outline(waits, colour);
      this.outline(made, colour);
      this.arrow(x, y, u, v, colour, 2.5);
    }
  }

  // An op in flight to another place in its worker's order.
  ghost() {
    const moved = this.moved;
    if (!moved || moved.to === undefined) return;
    const g = this.g, d = this.chart, first = this.first[2 * d.worker[moved.box]];
    const others = [];
    for (let i = first; i < this.first[2 * d.worker[moved.box] + 1]; i++) if (i !== moved.box) others.push(i);
    const before = others[moved.to - 1], after = others[moved.to];
    const time = after === undefined ? d.end[before] : before === undefined ? d.start[after] : (d.end[before] + d.start[after]) / 2;
    g.fillStyle = css("--wrong");
    g.fillRect(this.x(time) - 1.5, d.worker[moved.box] * this.pitch, 3, this.row);
    this.outline(moved.box, css("--wrong"));
  }

  arrow(x, y, u, v, colour, width) {
    const g = this.g, turn = Math.atan2(v - y, u - x);
    g.strokeStyle = g.fillStyle = colour;
    g.lineWidth = width;
    g.beginPath();
    g.moveTo(x, y);
    g.lineTo(u - 5 * Math.cos(turn), v - 5 * Math.sin(turn));
    g.stroke();
    g.beginPath();
    g.moveTo(u, v);
    for (const side of [-0.4, 0.4]) g.lineTo(u - 4.5 * width * Math.cos(turn + side), v - 4.5 * width * Math.sin(turn + side));
    g.fill();
  }

  // An arrow a message, from its sender's row to its receiver's.
  messages() {
    for (const [sender, receiver, start, end] of this.chart.messages) {
      if (end < this.t.view.from || start > this.t.view.to) continue;
      const down = (receiver > sender ? 0.25 : -0.25) * this.row;
      const from = sender * this.pitch + this.row / 2 + down, to = receiver * this.pitch + this.row / 2 - down;
      this.arrow(this.x(start), from, this.x(end), to, css("--ink"), 1.4);
    }
  }

  steady() {
    if (!this.chart.steady) return;
    const g = this.g;
    g.strokeStyle = css("--ink");
    g.lineWidth = 2;
    g.setLineDash([5, 3]);
    for (const side of [0, 1]) {
      g.beginPath();
      this.chart.steady.forEach((window, w) => {
        g.lineTo(this.x(window[side]), w * this.pitch);
        g.lineTo(this.x(window[side]), (w + 1) * this.pitch);
      });
      g.stroke();
    }
    g.setLineDash([]);
  }

  memory() {
    const g = this.g, d = this.chart, m = d.memory, top = this.memoryTop;
    this.frame(top, this.memoryRow, this.memoryRow);
    g.fillStyle = css("--faint");
    g.textAlign = "left";
    const most = m.unit === "bytes" ? bytes(m.most) : short(m.most) + " activations";
    // As many words as there is room for, beside "peak".
    const texts = [`memory of each worker, a full row is ${most}`, `memory, a full row is ${most}`, `full row: ${most}`];
    g.fillText(texts.find(text => g.measureText(text).width <= this.plotWidth) ?? most, LEFT, top - 12);
    g.fillText("peak", LEFT + this.plotWidth + 8, top - 12);
    g.fillStyle = css("--ink");
    if (this.memoryRow < 16) g.font = this.font.replace("12px", "11px");
    for (let w = 0; w < d.workers; w++)
      g.fillText(m.peaks[w], LEFT + this.plotWidth + 8, top + (w + 0.5) * this.memoryRow + 1);
    this.clipped(top, d.workers * this.memoryRow, () => {
      g.fillStyle = this.t.data.memory;
      for (let w = 0; w < d.workers; w++) {
        const times = m.times[w], amounts = m.amounts[w], floor = top + (w + 1) * this.memoryRow - 1;
        let i = Math.max(0, times.findIndex(t => t > this.t.view.from) - 1), x = this.x(times[i]);
        g.beginPath();
        g.moveTo(x, floor);
        for (; i < times.length && times[i] < this.t.view.to; i++) {
          let amount = amounts[i], next;
          // Steps within half a pixel are drawn as the highest of them.
          for (;; i++) {
            next = this.x(i + 1 < times.length ? times[i + 1] : d.makespan);
            if (next - x >= 0.5 || i + 1 >= times.length) break;
            amount = Math.max(amount, amounts[i + 1]);
          }
          const y = floor - (this.memoryRow - 3) * amount / m.most;
          g.lineTo(x, y);
          g.lineTo(next, y);
          x = next;
        }
        g.lineTo(x, floor);
        g.fill();
        if (d.limit && d.limit[w] < m.most) {
          g.fillStyle = css("--wrong");
          g.fillRect(LEFT, floor - (this.memoryRow - 3) * d.limit[w] / m.most, this.plotWidth, 1.5);
          g.fillStyle = this.t.data.memory;
        }
      }
    });
  }

  // What is under a point: a box, a worker's memory, or a bubble.
  at(x, y) {
    const d = this.chart, time = this.time(x);
    if (x < LEFT || x > LEFT + this.plotWidth || time > d.makespan) return null;
    if (y < this.rowsHeight) {
      const w = Math.floor(y / this.pitch), r = 2 * w + (y - w * this.pitch >= this.row ? 1 : 0);
      let i = this.after(r, time);
      // Something too narrow to hit is found beside the pointer.
      const reach = (this.t.view.to - this.t.view.from) / this.plotWidth;
      if (i < this.first[r + 1] && d.start[i] <= time + reach) return { box: i, worker: w, time };
      return r % 2 ? null : { worker: w, time, bubble: true };
    }
    const w = Math.floor((y - this.memoryTop) / this.memoryRow);
    return this.memoryRow && w >= 0 && w < d.workers ? { worker: w, time, memory: true } : null;
  }

  listen() {
    const c = this.canvas;
    let grabbed = null;
    c.addEventListener("wheel", event => {
      if (event.ctrlKey) return;
      event.preventDefault();
      const size = event.deltaMode === 1 ? 30 : 1;
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
        this.t.move((event.deltaX || event.deltaY) * size / this.plotWidth);
      else this.t.zoom(Math.exp(event.deltaY * size * 0.002), this.time(event.offsetX));
      this.point(event);
    }, { passive: false });
    c.addEventListener("pointerdown", event => {
      if (event.button !== 0) return;
      const found = this.at(event.offsetX, event.offsetY);
      c.setPointerCapture(event.pointerId);
      if (this.t.onMove && this.isOp(found?.box)) this.moved = { box: found.box, x: event.offsetX };
      else grabbed = event.offsetX;
    });
    c.addEventListener("pointermove", event => {
      if (this.moved) {
        c.classList.add("dragging");
        const far = Math.abs(event.offsetX - this.moved.x) > 4 || this.moved.to !== undefined;
        this.moved.to = far ? this.place(this.moved.box, this.time(event.offsetX)) : undefined;
      }
      if (grabbed !== null) {
        c.classList.add("dragging");
        this.t.move((grabbed - event.offsetX) / this.plotWidth);
        grabbed = event.offsetX;
      }
      if (this.moved?.to === undefined) this.point(event);
      else { this.t.cursor = null; this.t.hide(); }
    });
    c.addEventListener("pointerup", () => {
      const moved = this.moved;
      this.moved = null;
      if (moved && moved.to !== undefined) this.sends(moved.box, moved.to);
    });
    for (const name of ["pointerup", "pointercancel"])
      c.addEventListener(name, () => { grabbed = this.moved = null; c.classList.remove("dragging"); this.t.redraw(); });
    c.addEventListener("pointerleave", () => { this.t.cursor = null; this.t.hide(); });
    c.addEventListener("dblclick", () => this.t.all());
    c.addEventListener("blur", () => this.t.hide());
    c.addEventListener("keydown", event => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const keys = {
        "+": () => this.t.zoom(0.7), "=": () => this.t.zoom(0.7), "-": () => this.t.zoom(1 / 0.7),
        "ArrowLeft": () => this.t.move(-0.1), "ArrowRight": () => this.t.move(0.1), "0": () => this.t.all(), "Home": () => this.t.all(), "Escape": () => this.t.hide(),
        "n": () => this.step(1), "p": () => this.step(-1),
        "ArrowDown": () => this.beside(1), "ArrowUp": () => this.beside(-1),
        "[": () => this.sendsBy(-1), "]": () => this.sendsBy(1),
      };
      if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
    });
  }

  // What tells a box from all others.
  name(i) { const d = this.chart; return [d.texts[d.what[i]], d.texts[d.detail[i]], d.stage[i], d.worker[i], d.lane[i]].join("|"); }
  isOp(box) { return box !== undefined && this.chart.kind[box] !== this.t.data.syncKind; }

  // Which place in its worker's order a box would have at a time.
  place(box, time) {
    const d = this.chart, w = d.worker[box];
    let to = 0;
    for (let i = this.first[2 * w]; i < this.first[2 * w + 1]; i++)
      if (i !== box && (d.start[i] + d.end[i]) / 2 < time) to++;
    return to;
  }

  sends(box, to) {
    const w = this.chart.worker[box], from = box - this.first[2 * w];
    if (to !== from && to >= 0 && to < this.first[2 * w + 1] - this.first[2 * w]) this.t.onMove(this.index, w, from, to);
  }
  sendsBy(by) {
    const p = this.t.pointed;
    if (!this.t.onMove || !p || p.picture !== this || !this.isOp(p.box)) return;
    this.sends(p.box, p.box - this.first[2 * this.chart.worker[p.box]] + by);
  }

  point(event) {
    const found = this.at(event.offsetX, event.offsetY);
    this.t.cursor = event.offsetX >= LEFT ? this.time(event.offsetX) : null;
    if (found) this.t.show(this, found, event.clientX, event.clientY); else this.t.hide();
  }

  // The keyboard's way from op to op.
  step(by) {
    const chosen = this.t.pointed && this.t.pointed.picture === this && this.t.pointed.box !== undefined;
    this.choose(chosen ? this.t.pointed.box + by : this.after(0, this.t.view.from));
  }

  beside(by) {
    if (!this.t.pointed || this.t.pointed.picture !== this || this.t.pointed.box === undefined) return this.step(0);
    const d = this.chart, w = Math.max(0, Math.min(d.workers - 1, d.worker[this.t.pointed.box] + by));
    this.choose(Math.min(this.after(2 * w, d.start[this.t.pointed.box]), this.first[2 * w + 1] - 1));
  }

  choose(i) {
    const d = this.chart;
    if (i < 0 || i >= d.start.length) return;
    const span = this.t.view.to - this.t.view.from;
    if (d.start[i] < this.t.view.from || d.end[i] > this.t.view.to) this.t.look((d.start[i] + d.end[i] - span) / 2, (d.start[i] + d.end[i] + span) / 2);
    const place = this.canvas.getBoundingClientRect();
    const y = place.top + d.worker[i] * this.pitch + this.row;
    this.t.show(this, { box: i, worker: d.worker[i], byKeys: true }, place.left + this.x((d.start[i] + d.end[i]) / 2), y);
    this.t.said.textContent = this.t.tip.textContent;
  }
}

// An op as schedules write it: F3.7 is the forward of micro-batch 3 on stage 7.
function opName(data, d, i) {
  const batches = d.texts[d.what[i]].replace(/^.*micro-batch(es)? /, "");
  return data.letters[d.kind[i]] + (batches.includes(",") ? `(${batches.replaceAll(" ", "")})` : batches) + "." + d.stage[i];
}

export class Timeline {
  // Draws `data` in the element `place`. `onMove(chart, worker, from, to)` is told of an op that is dragged, or
  // sent by [ and ], to another place in its worker's order; without it a drag moves in time.
  constructor(place, data, { onMove = null, level = "h1" } = {}) {
    Object.assign(this, { place, onMove, level, pointed: null, cursor: null, queued: false, pictures: [] });
    place.classList.add("timeline");
    this.tip = make("div", "tip");
    this.tip.setAttribute("role", "tooltip");
    this.said = make("div", "unseen");
    this.said.setAttribute("aria-live", "polite");
    addEventListener("resize", () => this.redraw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    this.update(data);
  }

  // Draws other data in the same place; what is looked at, the chosen op and the focus stay as far as they can.
  update(data) {
    const focused = this.pictures.findIndex(p => p.canvas === document.activeElement);
    const chosen = !this.pointed?.byKeys ? null : [this.pictures.indexOf(this.pointed.picture), this.pointed.picture.name(this.pointed.box)];
    const whole = !this.data || (this.view.from === 0 && this.view.to === this.data.end) || this.view.from >= data.end;
    this.data = data;
    this.unit = data.unit === "F" ? ["F", 1] : data.end >= 1 ? ["s", 1] : data.end >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
    if (whole) this.view = { from: 0, to: data.end };
    else this.view.to = Math.min(this.view.to, data.end);
    this.hide();
    const height = this.place.offsetHeight;
    this.place.style.minHeight = this.pictures.length ? height + "px" : "";
    this.place.replaceChildren();
    this.pictures = [];
    data.charts.forEach((chart, index) => this.pictures.push(new Picture(this, chart, index)));
    this.place.append(this.tip, this.said);
    this.place.style.minHeight = "";
    if (focused >= 0) this.pictures[focused]?.canvas.focus({ preventScroll: true });
    if (chosen && focused >= 0) {
      const picture = this.pictures[chosen[0]], d = picture?.chart;
      const box = d ? d.start.findIndex((_, i) => picture.name(i) === chosen[1]) : -1;
      if (box >= 0) picture.choose(box);
    }
    this.redraw();
  }

  seconds(value, digits) { return short(value / this.unit[1], digits) + " " + this.unit[0]; }

  show(picture, found, x, y) {
    const d = picture.chart, rows = [["worker", String(found.worker)]];
    let title;
    if (found.box !== undefined) {
      const i = found.box, lane = d.lane[i] >= 0 ? d.lanes[d.lane[i]][0] : "", detail = d.texts[d.detail[i]];
      title = d.texts[d.what[i]];
      rows.unshift(["stage", d.stage[i]]);
      if (this.data.letters[d.kind[i]]) rows.unshift(["op", opName(this.data, d, i)]);
      if (lane) rows.push([lane.replace(/ \d+$/, "").split(" ").pop(), lane]);
      for (const need of d.needs[i])
        rows.push(["needs", `${d.texts[d.what[need]]}, stage ${d.stage[need]}, P${d.worker[need]}`]);
      for (const user of picture.users[i] || [])
        rows.push(["needed by", `${d.texts[d.what[user]]}, stage ${d.stage[user]}, P${d.worker[user]}`]);
      if (detail) for (const part of detail.split("; ")) rows.push(["", part]);
      rows.push(["start", this.seconds(d.start[i])], ["end", this.seconds(d.end[i])], ["lasts", this.seconds(d.end[i] - d.start[i])]);
      if (d.slack && i < d.slack.length && d.slack[i] !== null) rows.push(["slack", d.slack[i] ? this.seconds(d.slack[i]) : "none: it is critical"]);
    } else if (found.memory) {
      const m = d.memory, times = m.times[found.worker];
      let i = times.length - 1;
      while (i > 0 && times[i] > found.time) i--;
      const amount = m.amounts[found.worker][i];
      title = m.unit === "bytes" ? bytes(amount) : short(amount) + " activations";
      rows.push(["peak", m.peaks[found.worker]], ["at", this.seconds(found.time, 4)]);
    } else {
      title = "bubble";
      const gap = d.bubbles.find(b => b[0] === found.worker && b[1] <= found.time && found.time <= b[2]);
      if (gap) rows.push(["cause", d.texts[gap[3]]], ["start", this.seconds(gap[1])], ["end", this.seconds(gap[2])],
        ["lasts", this.seconds(gap[2] - gap[1])]);
      else rows.push(["at", this.seconds(found.time, 4)]);
    }
    this.pointed = { picture, box: found.box, byKeys: found.byKeys };
    const table = make("table");
    for (const [name, value] of rows) {
      const line = make("tr");
      line.append(make("td", "", name), make("td", "", String(value)));
      table.append(line);
    }
    this.tip.replaceChildren(make("b", "", title[0].toUpperCase() + title.slice(1)), table);
    this.tip.style.display = "block";
    const size = this.tip.getBoundingClientRect();
    this.tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - size.width - 8)) + "px";
    this.tip.style.top = (y + 18 + size.height > innerHeight ? Math.max(4, y - size.height - 10) : y + 18) + "px";
    this.redraw();
  }

  hide() { this.pointed = null; this.tip.style.display = "none"; this.redraw(); }

  look(from, to) {
    const end = this.data.end, span = Math.min(end, Math.max(to - from, end * 1e-6));
    this.view.from = Math.max(0, Math.min(from, end - span));
    this.view.to = this.view.from + span;
    this.redraw();
  }
  zoom(factor, around = (this.view.from + this.view.to) / 2) {
    this.look(around + (this.view.from - around) * factor, around + (this.view.to - around) * factor);
  }
  move(share) {
    const by = share * (this.view.to - this.view.from);
    this.look(this.view.from + by, this.view.to + by);
  }
  all() { this.look(0, this.data.end); }
  redraw() {
    if (this.queued) return;
    this.queued = true;
    requestAnimationFrame(() => { this.queued = false; colours.clear(); for (const p of this.pictures) p.draw(); });
  }
}
