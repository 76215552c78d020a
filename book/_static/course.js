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

  root.classList.add("mg-script");

  /* 1. Widgets (course/players.py). The page holds the first picture of each and all others as
        templates; the controls show only where there is a script (the class above). */
  function player(box) {
    var stage = box.querySelector(".mg-stage");
    var bar = box.querySelector(".mg-bar");
    var choice = box.querySelector(".mg-choice");
    var range = bar && bar.querySelector("input");
    var play = bar && bar.querySelector(".mg-play");
    var output = bar && bar.querySelector("output");
    var variants = [[stage.firstElementChild]];
    box.querySelectorAll("template").forEach(function (template) {
      var number = Number(template.dataset.variant);
      (variants[number] = variants[number] || []).push(template);
    });
    var variant = 0;
    var steps = variants.map(function () { return 0; });
    var timer = null;

    function figure(frame) {
      return frame.content ? frame.content.firstElementChild.cloneNode(true) : frame;
    }

    /* The page must not jump while pictures change: make room for the tallest, once it moves. */
    function reserve() {
      if (stage.style.minHeight) return;
      var trial = document.createElement("div");
      trial.className = "mg-stage mg-trial";
      stage.after(trial);
      var tallest = stage.getBoundingClientRect().height;
      variants[variant].forEach(function (item) {
        if (!item.content) return;
        trial.replaceChildren(figure(item));
        tallest = Math.max(tallest, trial.getBoundingClientRect().height);
      });
      trial.remove();
      stage.style.minHeight = tallest + "px";
    }

    function show() {
      var step = steps[variant];
      var frames = variants[variant];
      var old = stage.querySelector(".mg-pic");
      var left = old ? old.scrollLeft : 0;
      stage.replaceChildren(figure(frames[step]));
      var now = stage.querySelector(".mg-pic");
      if (now) now.scrollLeft = left;
      frame(stage);
      if (range) say(step, frames.length - 1);
    }

    function say(step, last) {
      var caption = stage.querySelector("figcaption");
      range.max = last;
      range.value = step;
      range.disabled = play.disabled = last < 1;
      range.setAttribute("aria-valuetext",
        step + " of " + last + (caption ? ": " + caption.textContent : ""));
      range.style.setProperty("--mg-done", last ? step / last : 0);
      output.textContent = step + " / " + last;
    }

    function stop() {
      if (timer === null) return;
      clearInterval(timer);
      timer = null;
      play.textContent = "\u25B6\uFE0E Play";
      box.classList.remove("mg-playing");
    }

    function start() {
      play.textContent = "Pause";
      box.classList.add("mg-playing");
      timer = setInterval(function () {
        var last = variants[variant].length - 1;
        if (steps[variant] < last) go(steps[variant] + 1);
        if (steps[variant] >= last) stop();
      }, Number(box.dataset.interval));
      if (steps[variant] >= variants[variant].length - 1) go(0);
    }

    /* Once, and not where the reader asked for less motion or has taken over. */
    function startWhenSeen() {
      if (!window.IntersectionObserver
          || window.matchMedia("(prefers-reduced-motion: reduce)").matches) return;
      var watch = new IntersectionObserver(function (entries) {
        if (!entries.some(function (entry) { return entry.isIntersecting; })) return;
        watch.disconnect();
        if (steps[variant] === 0 && timer === null) start();
      }, { threshold: 0.5 });
      watch.observe(stage);
    }

    function go(step) {
      reserve();
      steps[variant] = step;
      if (box.hasAttribute("data-together")) steps.fill(step);
      show();
    }

    if (bar) {
      range.addEventListener("input", function () { stop(); go(Number(range.value)); });
      bar.querySelector(".mg-first").addEventListener("click", function () { stop(); go(0); });
      play.addEventListener("click", function () {
        if (timer === null) start(); else stop();
      });
      say(0, variants[0].length - 1);
      if (box.hasAttribute("data-autoplay")) startWhenSeen();
    }
    if (choice) {
      var select = choice.querySelector("select");
      var buttons = Array.from(choice.querySelectorAll("button"));
      var pick = function (number) {
        stop();
        variant = number;
        stage.style.minHeight = "";
        buttons.forEach(function (button, i) {
          button.setAttribute("aria-pressed", i === number ? "true" : "false");
        });
        show();
      };
      buttons.forEach(function (button, i) {
        button.addEventListener("click", function () { pick(i); });
      });
      if (select) select.addEventListener("change", function () { pick(select.selectedIndex); });
    }
    box.dataset.ready = "yes";
  }

  /* Pictures that are wider than their frame fade out toward what is hidden. */
  function fade(frame) {
    var hidden = frame.scrollWidth - frame.clientWidth - frame.scrollLeft;
    frame.classList.toggle("mg-more", hidden > 8);
  }

  function frame(root) {
    root.querySelectorAll(".mg-pic").forEach(function (picture) {
      if (!picture.dataset.watched) {
        picture.dataset.watched = "yes";
        picture.addEventListener("scroll", function () { fade(picture); }, { passive: true });
      }
      fade(picture);
    });
  }

  /* 2. Definitions at the word: the title of a link to the glossary or to a cell, at once, also by
        keyboard. Without this script the browser shows the title in its own way. */
  function tips(page) {
    var tip = document.createElement("div");
    var shown = null;
    tip.className = "mg-tip";
    tip.id = "mg-tip";
    tip.setAttribute("role", "tooltip");
    tip.hidden = true;
    document.body.append(tip);

    function show(link) {
      if (link.title) {
        link.dataset.tip = link.title;
        link.removeAttribute("title");
      }
      shown = link;
      tip.textContent = link.dataset.tip;
      tip.hidden = false;
      link.setAttribute("aria-describedby", "mg-tip");
      var at = link.getClientRects()[0];
      var left = Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
      var below = at.bottom + 6 + tip.offsetHeight < window.innerHeight;
      tip.style.left = Math.max(8, left) + window.scrollX + "px";
      tip.style.top = (below ? at.bottom + 6 : at.top - tip.offsetHeight - 6) + window.scrollY + "px";
    }

    function hide() {
      if (!shown) return;
      shown.removeAttribute("aria-describedby");
      shown = null;
      tip.hidden = true;
    }

    ["mouseover", "focusin"].forEach(function (kind) {
      page.addEventListener(kind, function (event) {
        var link = event.target.closest("a.term, a.built");
        if (link) show(link); else if (kind === "mouseover") hide();
      });
    });
    page.addEventListener("focusout", hide);
    page.addEventListener("mouseleave", hide);
    document.addEventListener("keydown", function (event) { if (event.key === "Escape") hide(); });
  }

  /* 3. What scrolls by itself can be scrolled by keyboard. Each box is measured in the frame in which
        it gets another size (a `resize` event comes before the layout), and so also when what it is
        folded away in opens. */
  function scrollers(page) {
    function measure(box) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
    var boxes = page.querySelectorAll("pre, .pst-scrollable-table-container, div.math");
    var watch = new ResizeObserver(function (entries) {
      entries.forEach(function (entry) { measure(entry.target); });
    });
    boxes.forEach(function (box) { watch.observe(box); });
    document.fonts.ready.then(function () { boxes.forEach(measure); });
  }

  function watch() {
    var page = document.querySelector("article") || document.body;
    tips(page);
    page.querySelectorAll(".mg-player").forEach(player);
    performance.mark("widgets-ready");
    frame(page);
    scrollers(page);
    window.addEventListener("resize", function () {
      page.querySelectorAll(".mg-stage").forEach(function (stage) { stage.style.minHeight = ""; });
      frame(page);
    });
  }

  /* 4. Print what is folded away as well. */
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
