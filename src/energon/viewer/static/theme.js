"use strict";
// Runs before the page is painted, so that it does not flash in the other colors.
const root = document.documentElement;
const kept = localStorage.getItem("energon-theme");
if (kept) root.dataset.theme = kept;
// Works while a page is still being received, which scripts of the whole page wait for.
addEventListener("click", (event) => event.target.className === "stop" && stop());
