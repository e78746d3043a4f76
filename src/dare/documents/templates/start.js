// Before anything is painted: the colours that were chosen last time.
try {
  document.documentElement.dataset.theme = localStorage.getItem("dare-theme") || "auto";
} catch {
  document.documentElement.dataset.theme = "auto";
}
