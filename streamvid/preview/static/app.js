// Behavior of the preview. Every page works without it, except for playing and for the distributions.
"use strict";

const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// Parts of a page that are loaded later, or again.
async function load(part) {
  try {
    const answer = await fetch(part.dataset.src);
    if (!answer.ok) return;
    const text = await answer.text();
    if (part.shown === text) return;
    part.shown = text;
    part.innerHTML = text; // rendered by this server, with every value escaped
    const found = part.querySelector("[data-found-duration]");
    const place = document.querySelector("[data-duration]");
    if (found && place) place.replaceWith(found.dataset.foundDuration);
  } catch {
    // The server has ended, or the page is being left; what is shown stays.
  }
}
for (const part of all("[data-src]")) {
  if (part.dataset.every) setInterval(() => document.hidden || load(part), 1000 * part.dataset.every);
  else load(part);
}

// Endless grid: the link to the next page is replaced by its rows when it comes near.
const nearing = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => extend(entry.target)),
  { rootMargin: "600px" },
);
async function extend(link) {
  nearing.unobserve(link);
  try {
    const answer = await fetch(link.dataset.rows);
    if (!answer.ok) return;
    const rows = document.createElement("template");
    rows.innerHTML = await answer.text();
    watch(rows.content);
    link.replaceWith(rows.content);
  } catch {
    nearing.observe(link);
  }
}

// Clips play while the pointer or the focus is on them: the stored bytes, or a strip of frames that the loader decoded.
function play(picture) {
  if (picture.dataset.playing) return;
  picture.dataset.playing = "1";
  if (!picture.dataset.clip) return playStrip(picture);
  const video = document.createElement("video");
  Object.assign(video, { muted: true, loop: true, playsInline: true, src: picture.dataset.clip });
  video.setAttribute("aria-hidden", "true");
  video.addEventListener("playing", () => picture.classList.add("is-playing"));
  picture.append(video);
  video.play().catch(() => {});
}
function playStrip(picture) {
  if (!picture.dataset.strip) return;
  const strip = new Image();
  strip.className = "strip";
  strip.alt = "";
  strip.addEventListener("load", () => {
    const count = Math.max(1, Math.round(strip.naturalWidth / 240));
    let number = 0;
    picture.append(strip);
    strip.style.width = `${count * 100}%`;
    picture.classList.add("is-playing");
    picture.timer = setInterval(() => {
      strip.style.left = `${-100 * (number++ % count)}%`;
    }, 180);
  });
  strip.src = picture.dataset.strip;
}
function pause(picture) {
  delete picture.dataset.playing;
  picture.classList.remove("is-playing");
  clearInterval(picture.timer);
  for (const video of all("video", picture)) {
    video.pause();
    video.removeAttribute("src");
    video.load();
    video.remove();
  }
  for (const strip of all(".strip", picture)) strip.remove();
}
function watch(root) {
  for (const picture of all(".picture", root)) {
    for (const name of ["pointerenter", "focus"]) picture.addEventListener(name, () => play(picture));
    for (const name of ["pointerleave", "blur"]) picture.addEventListener(name, () => pause(picture));
  }
  for (const link of all(".more", root)) nearing.observe(link);
}
watch(document);

// Player of a sample: all pictures show the same frame.
function openPlayer(player) {
  const count = Number(player.dataset.frames);
  const pictures = all(".frame", player);
  const scrub = player.querySelector(".scrub");
  const button = player.querySelector(".play");
  if (!scrub) return;
  let timer = null;
  const loaded = new Map();
  const address = (picture, number) => picture.dataset.base + number + picture.dataset.query;
  const fetchFrame = (picture, number) => {
    const link = address(picture, number);
    if (!loaded.has(link)) {
      const image = new Image();
      image.src = link;
      loaded.set(link, image);
    }
  };
  const show = (number) => {
    scrub.value = (number + count) % count;
    player.querySelector(".at").textContent = `${Number(scrub.value) + 1} / ${count}`;
    for (const picture of pictures) picture.src = address(picture, scrub.value);
  };
  const toggle = () => {
    if (timer === null) {
      for (const picture of pictures) for (let number = 0; number < count; number++) fetchFrame(picture, number);
      timer = setInterval(() => show(Number(scrub.value) + 1), 1000 / Math.min(60, Number(player.dataset.fps)));
    } else {
      clearInterval(timer);
      timer = null;
    }
    button.textContent = timer === null ? "Play" : "Pause";
    button.setAttribute("aria-pressed", String(timer !== null));
  };
  scrub.addEventListener("input", () => show(Number(scrub.value)));
  button.addEventListener("click", toggle);
  return { move: (by) => show(Number(scrub.value) + by), toggle };
}
const player = all(".player").map(openPlayer)[0];

// Forms apply a choice at once, and leave defaults out of the address.
for (const form of all("form[data-auto]")) {
  for (const field of all("select, input[type=checkbox], input[type=number]", form)) {
    field.addEventListener("change", () => form.requestSubmit());
  }
  form.addEventListener("submit", () => {
    for (const field of all("input, select", form)) field.disabled = field.value === "";
  });
  window.addEventListener("pageshow", () => all("input, select", form).forEach((field) => (field.disabled = false)));
}

// Keys.
function step(by, isRow) {
  const pictures = all(".picture");
  const at = pictures.indexOf(document.activeElement);
  if (!pictures.length) return;
  let next = at + by;
  if (at < 0) next = 0;
  else if (isRow) {
    const columns = pictures.filter((one) => one.offsetTop === pictures[0].offsetTop).length || 1;
    next = at + by * columns;
  }
  if (pictures[next]) pictures[next].focus();
}
document.addEventListener("keydown", (event) => {
  const inField = event.target.matches("input, select, textarea");
  if (event.key === "Escape") {
    document.activeElement.blur();
    return;
  }
  if (inField || event.ctrlKey || event.metaKey || event.altKey) return;
  const filter = document.querySelector("#filter, input[name=template]");
  const moves = { ArrowLeft: [-1, false], ArrowRight: [1, false], ArrowUp: [-1, true], ArrowDown: [1, true] };
  if (event.key === "/" && filter) {
    event.preventDefault();
    filter.focus();
    filter.select();
  } else if (player && event.key === " " && event.target === document.body) {
    event.preventDefault();
    player.toggle();
  } else if (player && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
    player.move(event.key === "ArrowLeft" ? -1 : 1);
  } else if (event.key === "n" || event.key === "p") {
    const link = document.querySelector(event.key === "n" ? "[rel=next]" : "[rel=prev]");
    if (link) link.click();
  } else if (moves[event.key] && document.querySelector(".picture")) {
    const [by, isRow] = moves[event.key];
    if (isRow && !document.activeElement.matches(".picture")) return; // the page scrolls
    event.preventDefault();
    step(by, isRow);
  }
});
