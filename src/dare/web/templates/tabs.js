// The parts are tabs: the address names the part that is shown, or something in it.
"use strict";
(() => {
  const list = document.querySelector("[role=tablist]");
  const tabs = [...list.children];
  const panelOf = (tab) => document.getElementById(tab.hash.slice(1));

  function show() {
    const target = document.getElementById(location.hash.slice(1));
    const chosen = tabs.find((tab) => panelOf(tab).contains(target));
    if (target && !chosen) return;  // the link that skips the tabs
    for (const tab of tabs) {
      const isShown = tab === (chosen ?? tabs[0]);
      Object.assign(tab, { ariaSelected: isShown, tabIndex: isShown ? 0 : -1 });
      Object.assign(panelOf(tab), { role: "tabpanel", hidden: !isShown });
    }
    target?.scrollIntoView();
    dispatchEvent(new Event("resize"));  // figures have a width now
  }

  list.addEventListener("keydown", ({ key }) => {
    const at = tabs.indexOf(document.activeElement);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[key];
    if (next === undefined) return;
    tabs.at(next % tabs.length).focus();
    history.pushState(null, "", document.activeElement.hash);  // setting the hash takes the focus
    show();
  });
  addEventListener("hashchange", show);
  show();
})();
