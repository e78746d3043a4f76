// Brings out the model that is picked.
"use strict";
(() => {
  const picker = document.getElementById("model");

  async function pick() {
    for (const element of document.querySelectorAll("[data-models]")) {
      const names = JSON.parse(element.dataset.models);
      element.hidden = Boolean(picker.value) && !names.includes(picker.value);
    }
    for (const row of document.querySelectorAll("tr[data-model]")) {
      row.classList.toggle("chosen", row.dataset.model === picker.value);
    }
    await darePage.setSignal("model", picker.value);
    darePage.say(
      picker.value ? `The figures show ${picker.value}.` : "The figures show all models.",
    );
  }

  picker.addEventListener("change", pick);
  darePage.drawAll().then(pick);
})();
