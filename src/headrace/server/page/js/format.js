// Numbers as people of a language write them; no line ends between a number and its unit.

const GAP = "\u00a0";

export function formatNumber(value, language, digits = 0) {
  return new Intl.NumberFormat(language, { maximumFractionDigits: digits, minimumFractionDigits: 0 }).format(value);
}

export function formatBytes(bytes, language) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let value = bytes;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || value >= 99.5 ? 0 : value >= 9.95 ? 1 : 2;
  return `${formatNumber(value, language, digits)}${GAP}${units[unit]}`;
}

export function formatSeconds(seconds, language) {
  if (seconds < 0.0995) return `${formatNumber(seconds * 1000, language, seconds < 0.01 ? 1 : 0)}${GAP}ms`;
  return `${formatNumber(seconds, language, seconds < 10 ? 2 : 1)}${GAP}s`;
}

export function formatTimes(ratio, language) {
  return formatNumber(ratio, language, ratio < 10 ? 1 : 0);
}

export function formatPercent(share, language) {
  const digits = share > 0 && share < 0.1 ? 1 : 0;
  return new Intl.NumberFormat(language, { style: "percent", maximumFractionDigits: digits }).format(share);
}
