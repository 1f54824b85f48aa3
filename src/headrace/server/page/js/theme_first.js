// Runs before the first paint, so that a chosen theme never flashes the other one.
(function () {
  try {
    var theme = localStorage.getItem("headrace.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
    var language = localStorage.getItem("headrace.language");
    if (language === "en" || language === "ko") document.documentElement.lang = language;
  } catch (problem) {
    // storage may be forbidden; the system's theme is used then
  }
})();
