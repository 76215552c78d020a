/* What the book's pages need beyond the theme. Runs in the head, before all deferred scripts. */

/* Where the theme's FontAwesome script is loaded (course/book.py takes it out), it must not watch the
   page: it would replace the icons in a widget's buttons, and the widget then throws. */
window.FontAwesomeConfig = { observeMutations: false };

(function () {
  "use strict";

  /* 0. A first visit: the theme logs an error when no mode was ever chosen, and shows the light theme
        until its own script runs. */
  var root = document.documentElement;
  if (!root.dataset.mode) {
    var dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.mode = "auto";
    root.dataset.theme = dark ? "dark" : "light";
  }

  /* 1. ipywidgets calls MathJax 2 wherever it finds a MathJax; ours is MathJax 3, and the texts in
        our widgets hold no mathematics. This listener runs before the one that draws widgets. */
  window.addEventListener("load", function () {
    if (window.MathJax && !window.MathJax.Hub) window.MathJax.Hub = { Queue: function () {} };
  });

  /* 2. Widgets: what a screen reader says for the slider's handle and the play buttons. ipywidgets
        sets the handle's role and value, but no name. */
  function label(root) {
    root.querySelectorAll(".mg-widget .noUi-handle:not([aria-label])").forEach(function (handle) {
      var box = handle.closest(".widget-slider");
      var text = box && box.querySelector(".widget-label");
      handle.setAttribute("aria-label", (text && text.textContent.trim()) || "Step");
    });
    root.querySelectorAll(".mg-widget .widget-play button").forEach(function (button) {
      if (button.hasAttribute("aria-label")) return;
      var first = button === button.parentNode.querySelector("button");
      button.setAttribute("aria-label", first ? "Play or pause" : "Back to the first step");
      button.setAttribute("title", first ? "Play or pause" : "Back to the first step");
    });
    root.querySelectorAll(".mg-widget .widget-readout:not([aria-label])").forEach(function (field) {
      field.setAttribute("role", "textbox");
      field.setAttribute("aria-label", "Step number");
    });
  }

  /* Pictures that are wider than their frame fade out toward what is hidden. */
  function fade(frame) {
    var hidden = frame.scrollWidth - frame.clientWidth - frame.scrollLeft;
    frame.classList.toggle("mg-more", hidden > 8);
  }

  function frames(root) {
    root.querySelectorAll(".mg-pic").forEach(function (frame) {
      if (!frame.dataset.watched) {
        frame.dataset.watched = "yes";
        frame.addEventListener("scroll", function () { fade(frame); }, { passive: true });
      }
      fade(frame);
    });
  }

  function watch() {
    var page = document.querySelector("article") || document.body;
    var waiting = false;
    new MutationObserver(function () {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(function () {
        waiting = false;
        label(page);
        frames(page);
      });
    }).observe(page, { childList: true, subtree: true });
    label(page);
    frames(page);
    window.addEventListener("resize", function () { frames(page); });
  }

  /* 3. Print what is folded away as well. */
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details:not([open])").forEach(function (details) {
      details.setAttribute("data-was-closed", "");
      details.open = true;
    });
  });
  window.addEventListener("afterprint", function () {
    document.querySelectorAll("details[data-was-closed]").forEach(function (details) {
      details.removeAttribute("data-was-closed");
      details.open = false;
    });
  });

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", watch);
  else watch();
})();
