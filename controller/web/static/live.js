// Keeps the page fresh. Without this script the page is complete, it just has to be reloaded by hand.
"use strict";

const live = document.getElementById("live");
let stale = false;
let loading = false;

function openDetails() {
  return [...document.querySelectorAll("main details[open]")].map((element) => element.id);
}

async function refresh() {
  const reading = !document.getSelection().isCollapsed;
  if (document.hidden || reading || loading) {
    stale = true;
    return;
  }
  stale = false;
  loading = true;
  try {
    const answer = await fetch(location.pathname, { cache: "no-store" });
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const opened = openDetails();
    document.querySelector("main").replaceWith(fresh.querySelector("main"));
    document.title = fresh.title;
    opened.forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
  } catch (error) {
    stale = true;
  } finally {
    loading = false;
  }
}

const source = new EventSource("/events");
source.addEventListener("open", () => { live.textContent = "live"; });
source.addEventListener("error", () => { live.textContent = "not connected"; });
source.addEventListener("changed", refresh);
document.addEventListener("visibilitychange", () => { if (stale) refresh(); });
document.addEventListener("selectionchange", () => { if (stale) refresh(); });
