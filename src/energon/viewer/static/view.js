"use strict";
const root = document.documentElement;
const kept = localStorage.getItem("energon-theme");
if (kept) root.dataset.theme = kept;

function turnTheme() {
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("energon-theme", root.dataset.theme);
}
document.getElementById("theme").addEventListener("click", turnTheme);

for (const link of document.querySelectorAll(".zoom")) {
  link.addEventListener("click", (event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    link.classList.toggle("full");
  });
}

function follow(rel) {
  const link = document.querySelector(`a[rel="${rel}"]`);
  if (link) location.href = link.href;
}
const keys = {
  ArrowLeft: () => follow("prev"),
  ArrowRight: () => follow("next"),
  h: () => follow("prev"),
  l: () => follow("next"),
  u: () => follow("up"),
  t: turnTheme,
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^(INPUT|SELECT|TEXTAREA|VIDEO|AUDIO)$/.test(event.target.tagName)) return;
  const field = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (field) {
    event.preventDefault();
    field.focus();
    field.select();
  } else if (event.key in keys) {
    keys[event.key]();
  }
});
