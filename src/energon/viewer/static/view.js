"use strict";
const byId = (id) => document.getElementById(id);

function turnTheme() {
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("energon-theme", root.dataset.theme);
}
byId("theme").addEventListener("click", turnTheme);

function showKeys() {
  byId("keys").showModal();
}
byId("help").addEventListener("click", showKeys);

for (const link of document.querySelectorAll(".zoom")) {
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    link.classList.toggle("full");
  });
}

// What cannot be decoded has no thumbnail: its card says so.
function markFailed(image) {
  image.closest(".frame")?.classList.add("failed");
}
addEventListener("error", (event) => event.target.tagName === "IMG" && markFailed(event.target), true);
for (const image of document.images) {
  if (image.complete && !image.naturalWidth && image.getAttribute("src")) markFailed(image);
}

function follow(selector) {
  const link = document.querySelector(selector);
  if (link) location.href = link.href;
}
const keys = {
  ArrowLeft: () => follow('a[rel="prev"]'),
  ArrowRight: () => follow('a[rel="next"]'),
  h: () => follow('a[rel="prev"]'),
  l: () => follow('a[rel="next"]'),
  u: () => follow('a[rel="up"]'),
  v: () => follow("#view"),
  s: () => follow("#statistics"),
  r: () => (location.href = "/run"),
  z: () => document.querySelector(".zoom")?.classList.toggle("full"),
  x: () => document.activeElement.closest(".card, tr")?.querySelector(".pick")?.click(),
  t: turnTheme,
  "?": showKeys,
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
  if (event.key === "Escape") document.activeElement?.blur();
  if (/^(INPUT|SELECT|TEXTAREA|VIDEO|AUDIO)$/.test(event.target.tagName)) return;
  const field = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (field) {
    event.preventDefault();
    const folded = field.closest("details");
    if (folded) folded.open = true;
    field.focus();
    field.select();
  } else if (event.key in keys) {
    keys[event.key]();
  }
});

// Selected samples stay selected while their cards are dropped: a field of the form keeps each.
const picked = byId("picked");
const keptPicks = () => [...(picked?.querySelectorAll('[name="ordinal"]') ?? [])];

function countPicked() {
  const count = new FormData(picked).getAll("ordinal").length;
  byId("picked-count").textContent = `${count} ${count === 1 ? "sample" : "samples"} selected`;
}

function drop(card) {
  if (card.querySelector(".pick:checked")) {
    const kept = document.createElement("input");
    kept.type = "hidden";
    kept.name = "ordinal";
    kept.value = card.querySelector(".pick").value;
    picked.append(kept);
  }
  card.remove();
}

function pickAgain(cards) {
  for (const kept of keptPicks()) {
    const pick = cards.querySelector(`.pick[value="${kept.value}"]`);
    if (!pick) continue;
    pick.checked = true;
    kept.remove();
  }
}

if (picked) {
  addEventListener("change", (event) => event.target.className === "pick" && countPicked());
  picked.addEventListener("submit", () => (picked.elements.back.value = location.pathname + location.search));
}

// A gallery of any number of samples: pieces are loaded where somebody looks, and those far away
// are dropped. The slider at the side stands for all of the dataset.
class Gallery {
  static PIECE = 60;
  static KEPT = 360;

  constructor(list) {
    this.list = list;
    this.start = Number(list.dataset.start);
    this.stop = Number(list.dataset.stop);
    this.total = Number(list.dataset.total);
    this.busy = false;
    this.jumps = 0;
    this.scrub = byId("scrub");
    if (this.scrub) {
      this.scrub.hidden = false;
      this.scrub.addEventListener("input", () => this.say(Number(this.scrub.value)));
      this.scrub.addEventListener("change", () => this.jump(Number(this.scrub.value)));
    }
    addEventListener("scroll", () => this.look(), { passive: true });
    addEventListener("resize", () => this.look());
    // At the top there is nothing left to scroll, but somebody may want to.
    addEventListener("wheel", (event) => this.look(event.deltaY < 0), { passive: true });
    addEventListener("touchmove", () => this.look(scrollY <= 0), { passive: true });
    addEventListener("keydown", (event) => this.look(/^(ArrowUp|PageUp|Home)$/.test(event.key)));
    this.look();
  }

  get columns() {
    return getComputedStyle(this.list).gridTemplateColumns.split(" ").length;
  }

  // Whole rows, so that no card changes its column when others come or go above it.
  get piece() {
    return Math.ceil(Gallery.PIECE / this.columns) * this.columns;
  }

  async fetch(from, count) {
    const answer = await fetch(`${this.list.dataset.base}?cards&from=${from}&count=${count}`);
    const holder = document.createElement("template");
    holder.innerHTML = answer.ok ? await answer.text() : "";
    return holder.content;
  }

  async look(wantsUp = false) {
    if (this.busy) return;
    this.busy = true;
    const box = this.list.getBoundingClientRect();
    if (box.bottom < 2 * innerHeight && this.stop < this.total) await this.grow();
    else if (box.top > -innerHeight && (scrollY > 0 || wantsUp) && this.start > 0) await this.growUp();
    this.busy = false;
    this.say();
  }

  async grow() {
    const jumps = this.jumps;
    const cards = await this.fetch(this.stop, this.piece);
    if (jumps !== this.jumps) return; // somebody is elsewhere by now
    pickAgain(cards);
    this.list.append(cards);
    const count = this.list.children.length;
    if (this.start + count === this.stop) this.total = this.stop; // there is no more
    this.stop = this.start + count;
    const surplus = Math.floor((count - Gallery.KEPT) / this.columns) * this.columns;
    if (surplus > 0) {
      this.keepPlace(() => {
        for (let n = 0; n < surplus; n++) drop(this.list.firstElementChild);
        this.start += surplus;
      });
    }
  }

  async growUp() {
    const count = Math.min(this.piece, this.start);
    const jumps = this.jumps;
    const cards = await this.fetch(this.start - count, count);
    if (jumps !== this.jumps) return;
    pickAgain(cards);
    this.keepPlace(() => this.list.prepend(cards));
    this.start -= count;
    while (this.list.children.length > Gallery.KEPT) drop(this.list.lastElementChild);
    this.stop = this.start + this.list.children.length;
  }

  keepPlace(change) {
    const card = this.firstSeen();
    const before = card.getBoundingClientRect().top;
    change();
    scrollBy(0, card.getBoundingClientRect().top - before);
  }

  firstSeen() {
    const below = byId("main").getBoundingClientRect().top < 0 ? 0 : -Infinity;
    for (const card of this.list.children) {
      if (card.getBoundingClientRect().bottom > Math.max(below, 60)) return card;
    }
    return this.list.lastElementChild;
  }

  async jump(ordinal) {
    const first = Math.max(0, Math.min(ordinal, this.total - 1));
    this.jumps++;
    const jumps = this.jumps;
    this.list.ariaBusy = "true";
    const cards = await this.fetch(first, this.piece);
    if (jumps !== this.jumps) return;
    this.list.ariaBusy = "false";
    [...this.list.children].forEach(drop);
    pickAgain(cards);
    this.list.append(cards);
    this.start = first;
    this.stop = first + this.list.children.length;
    scrollTo(0, this.list.getBoundingClientRect().top + scrollY - 60);
    this.say();
  }

  say(ordinal) {
    const first = ordinal ?? this.start + [...this.list.children].indexOf(this.firstSeen());
    const range = byId("range");
    if (range) range.textContent = `Sample ${first.toLocaleString("en")} of ${Number(this.list.dataset.total).toLocaleString("en")}`;
    if (this.scrub && ordinal === undefined) {
      this.scrub.step = this.columns; // a smaller step would lead back to the beginning of its row
      this.scrub.value = first;
    }
    if (ordinal === undefined && scrollY > 0) history.replaceState(null, "", `?from=${first}`);
  }
}
const gallery = byId("gallery");
if (gallery?.dataset.scrolls && gallery.children.length) new Gallery(gallery);
