"use strict";
// Keeps the part "Now" up to date, once a second while somebody looks. Everything else works without this.
const now = document.getElementById("now");
const stale = document.getElementById("stale");
let shown = "";

async function look() {
  try {
    const answer = await fetch(location.origin + now.dataset.from, { cache: "no-store" });
    if (answer.status === 401) {
      now.textContent = "This party was started anew; load the page again, and log in with the new token.";
      return;
    }
    if (!answer.ok) throw new Error(answer.status);
    const text = await answer.text();
    if (text !== shown) now.innerHTML = text;
    shown = text;
    stale.hidden = answer.headers.get("X-State") === now.dataset.state;
  } catch {
    shown = now.textContent = "The service of this party does not answer; it may have been stopped.";
  }
  setTimeout(look, document.hidden ? 10000 : 1000);
}

if (now) setTimeout(look, 1000);
