// Builds elements. Text from a log enters the page only as text nodes: nothing here parses HTML.

const NOT_ATTRIBUTES = new Set(["class", "text", "data", "style"]);

/** Make an element: `h("a.link", { href, onclick }, "text", node, [nodes], null)`. */
export function h(tag, props = null, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(props ?? {})) setProp(element, key, value);
  append(element, children);
  return element;
}

function setProp(element, key, value) {
  if (value === null || value === undefined || value === false) return;
  if (typeof value === "function") element.addEventListener(key.slice(2), value);
  else if (!NOT_ATTRIBUTES.has(key)) element.setAttribute(key, value === true ? "" : value);
  else if (key === "class") element.classList.add(...String(value).split(" ").filter(Boolean));
  else if (key === "text") element.textContent = value;
  else if (key === "data") Object.assign(element.dataset, value);
  else for (const [name, part] of Object.entries(value)) element.style.setProperty(name, part);
}

/** Append nodes, texts and lists of them; null, undefined and false are left out. */
export function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** Replace what an element contains. */
export function fill(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

/** The one element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

const SCHEMES = new Set(["http:", "https:", "mailto:"]);

/** Return the address if a link may lead there: absolute, and http, https or mailto. */
export function safeHref(address) {
  try {
    const url = new URL(address);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** A link out of the page, or only its text if the address is not safe. */
export function outLink(address, ...children) {
  const href = safeHref(address);
  if (href === null) return h("span.dead-link", { title: "This address is not opened." }, children);
  return h("a", { href, rel: "noopener noreferrer", target: "_blank" }, children);
}

const RASTER = /^data:image\/(?:png|jpeg|gif|webp|avif|bmp);base64,[A-Za-z0-9+/=\s]*$/;

/** Whether the source of an image is the image itself, of a type that cannot contain scripts. */
export function isEmbeddedImage(source) {
  return RASTER.test(source);
}

let announcing = 0;

/** Tell people who listen to the page, and show it for a moment. */
export function announce(text, kind = "info") {
  const place = byId("announcements");
  const note = h("p", { class: `note-${kind}` }, text);
  place.append(note);
  announcing += 1;
  setTimeout(() => note.remove(), kind === "error" ? 12_000 : 5_000);
  return note;
}

/** A disclosure whose content is made when it is first opened. */
export function details(summary, build, { open = false, ...props } = {}) {
  const body = h("div.details-body");
  const element = h("details", props, h("summary", null, summary), body);
  let isBuilt = false;
  const show = () => {
    if (isBuilt || !element.open) return;
    isBuilt = true;
    append(body, [build()]);
  };
  element.addEventListener("toggle", show);
  if (open) {
    element.open = true;
    show();
  }
  return element;
}
