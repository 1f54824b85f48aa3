// What the browser remembers. Reading and writing never fail: where storage is forbidden, nothing is remembered.

const PREFIX = "headrace.";

export function recall(name, area = localStorageOrNull()) {
  try {
    return area ? area.getItem(PREFIX + name) : null;
  } catch {
    return null;
  }
}

export function remember(name, value, area = localStorageOrNull()) {
  try {
    if (!area) return;
    if (value === null) area.removeItem(PREFIX + name);
    else area.setItem(PREFIX + name, value);
  } catch {
    // full or forbidden: the page works without
  }
}

function localStorageOrNull() {
  try {
    return window.localStorage;
  } catch {
    return null;
  }
}

export function untilTabCloses() {
  try {
    return window.sessionStorage;
  } catch {
    return null;
  }
}
