/* What the book's pages need beyond the theme. Runs in the head, before all deferred scripts. */

/* Where the theme's FontAwesome script is loaded (course/book/extension.py takes it out), it must not watch the
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

  /* 1. Widgets (course/book/players.py). The page holds the first picture of each and all others as
        templates; the controls show only where there is a script (the class above). */
  function player(box) {
    var stage = box.querySelector(".mg-stage");
    var bar = box.querySelector(".mg-bar");
    var choice = box.querySelector(".mg-choice");
    var range = bar && bar.querySelector("input");
    var play = bar && bar.querySelector(".mg-play");
    var output = bar && bar.querySelector("output");
    var label = bar && bar.querySelector("label");
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
      var caption = 0;
      variants[variant].forEach(function (item) {
        trial.replaceChildren(item.content ? figure(item) : item.cloneNode(true));
        caption = Math.max(caption, height(trial.querySelector("figcaption")));
      });
      stage.style.setProperty("--mg-caption", caption + "px");
      trial.style.setProperty("--mg-caption", caption + "px");
      fit(stage);
      var tallest = height(stage);
      variants[variant].forEach(function (item) {
        if (!item.content) return;
        trial.replaceChildren(figure(item));
        trial.dataset.wide = stage.dataset.wide || 0;
        fit(trial);
        tallest = Math.max(tallest, height(trial));
      });
      trial.remove();
      stage.dataset.wide = trial.dataset.wide || 0;
      fit(stage);
      stage.style.minHeight = tallest + "px";
    }

    function height(element) {
      return element ? element.getBoundingClientRect().height : 0;
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
      var item = variants[variant][step];
      var of = item.content ? item : stage;
      output.textContent = of.dataset.value || step + " / " + last;
      label.textContent = of.dataset.name || "Step";
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
        release(stage);
        buttons.forEach(function (button, i) {
          button.setAttribute("aria-pressed", i === number ? "true" : "false");
        });
        show();
      };
      buttons.forEach(function (button, i) {
        button.addEventListener("click", function () { pick(i); });
      });
      rove(buttons, 0);
      if (select) select.addEventListener("change", function () { pick(select.selectedIndex); });
    }
    box.dataset.ready = "yes";
  }

  /* Forget the room that was made for a player's pictures. */
  function release(stage) {
    stage.style.minHeight = "";
    stage.style.removeProperty("--mg-caption");
    delete stage.dataset.wide;
  }

  /* Pictures that are wider than their frame fade out toward what is hidden. */
  function fade(frame) {
    var hidden = frame.scrollWidth - frame.clientWidth - frame.scrollLeft;
    frame.classList.toggle("mg-more", hidden > 8);
  }

  function frame(root) {
    fit(root);
    root.querySelectorAll(".mg-pic").forEach(function (picture) {
      if (!picture.dataset.watched) {
        picture.dataset.watched = "yes";
        picture.addEventListener("scroll", function () { fade(picture); }, { passive: true });
        rove(Array.from(picture.querySelectorAll("svg [tabindex='0']")), 0);
      }
      /* One stop for the Tab key: the linked parts, or else the frame, if it scrolls. */
      if (picture.scrollWidth > picture.clientWidth && !picture.querySelector("[data-rove]")) {
        picture.tabIndex = 0;
      } else picture.removeAttribute("tabindex");
      fade(picture);
    });
  }

  /* 2. Labels that can be read in a picture that is smaller than it was drawn. They grow to 12
        pixels; where they would then run into each other, a picture on a phone gets wider than its
        frame instead, and on a wide screen they stay as they are. */
  var LABEL = 12, DRAWN = 13, STEP = 1.05, PHONE = 600;

  function fit(root) {
    root.querySelectorAll(".mg-pic > svg.mg").forEach(function (svg) {
      var box = svg.parentElement;
      if (!box.clientWidth) return;
      var view = svg.dataset.view || svg.getAttribute("viewBox");
      svg.dataset.view = view;
      svg.setAttribute("viewBox", view);
      svg.classList.remove("mg-fit");
      box.style.setProperty("--mg-w", "0px");
      var size = view.split(" ").map(Number);
      var phone = window.innerWidth <= PHONE;
      var width = svg.getBoundingClientRect().width;
      if (width >= size[2] * LABEL / DRAWN - 0.5) return;
      /* What one picture of a player needed, the others begin with. */
      var stage = svg.closest(".mg-stage");
      var before = boxes(svg);
      var shapes = small(svg);
      svg.classList.add("mg-fit");
      if (stage && phone) width = Math.max(width, Number(stage.dataset.wide) || 0);
      for (;; width *= STEP) {
        width = Math.min(width, size[2] * LABEL / DRAWN);
        svg.style.setProperty("--mg-label", LABEL * size[2] / width + "px");
        var after = boxes(svg);
        if (phone) widen(svg, size, after, width);
        if (!collide(before, after, shapes, svg.viewBox.baseVal)) break;
        svg.setAttribute("viewBox", view);
        if (!phone) {
          svg.classList.remove("mg-fit");
          return;
        }
        if (width >= size[2] * LABEL / DRAWN) break;
      }
      if (width > box.clientWidth) box.style.setProperty("--mg-w", width + "px");
      if (stage) stage.dataset.wide = width;
    });
  }

  /* Labels at the edge of a chart get room beside it. */
  function widen(svg, size, labels, width) {
    var left = 0, right = size[2];
    labels.forEach(function (label) {
      left = Math.min(left, label.left - 1);
      right = Math.max(right, label.right + 1);
    });
    var wider = right - left;
    if (wider === size[2] || wider > size[2] * 1.15) return;
    svg.setAttribute("viewBox", [left, size[1], wider, size[3]].join(" "));
    svg.style.setProperty("--mg-label", LABEL * wider / width + "px");
  }

  function boxes(svg) {
    return Array.from(svg.querySelectorAll("text")).map(function (text) {
      var box = text.getBBox();
      var edge = text.parentNode.querySelector(":scope > rect");
      edge = edge && edge.getBBox();
      return {
        left: box.x,
        right: box.x + box.width,
        top: box.y + 0.17 * box.height,
        bottom: box.y + 0.83 * box.height,
        out: edge ? Math.max(edge.x - box.x, box.x + box.width - edge.x - edge.width) : -1,
      };
    });
  }

  /* What stands beside a word: the samples of a legend. */
  function small(svg) {
    return Array.from(svg.querySelectorAll("rect, line, path")).map(function (shape) {
      var box = shape.getBBox();
      return { left: box.x, right: box.x + box.width, top: box.y, bottom: box.y + box.height + 3 };
    }).filter(function (box) {
      return box.right - box.left <= 30 && box.bottom - box.top <= 24;
    });
  }

  function collide(before, after, shapes, view) {
    function over(a, b, enough) {
      return Math.min(a.right, b.right) - Math.max(a.left, b.left) > (enough || 2.5)
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2;
    }
    return after.some(function (a, i) {
      return a.left < view.x - 1 || a.right > view.x + view.width + 1
        || (a.out > 1.5 && before[i].out <= 1.5)
        || after.slice(0, i).some(function (b, j) { return over(a, b) && !over(before[i], before[j]); })
        || shapes.some(function (b) { return over(a, b, 5) && !over(before[i], b, 0.5); });
    });
  }

  /* 3. One stop for the Tab key where there are many things of a kind: the arrow keys go from one to
        the next. Without this script each is a stop of its own. */
  function rove(items, first) {
    if (items.length < 2) return;
    items.forEach(function (item, i) {
      item.roving = items;
      item.dataset.rove = "";
      item.setAttribute("tabindex", i === first ? "0" : "-1");
    });
  }

  function stopAt(item) {
    item.roving.forEach(function (other) {
      other.setAttribute("tabindex", other === item ? "0" : "-1");
    });
  }

  function keys(event) {
    var item = event.target.closest && event.target.closest("[data-rove]");
    if (!item || !item.roving || event.altKey || event.ctrlKey || event.metaKey) return;
    var step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step && item.closest("svg, nav, .mg-choice")) {
      step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    }
    if (!step) return;
    event.preventDefault();
    var there = item.roving.filter(function (other) {
      return other === item || (other.isConnected && other.checkVisibility());
    });
    var next = there[(there.indexOf(item) + step + there.length) % there.length];
    next.focus();
  }

  function groups(page) {
    document.addEventListener("keydown", keys);
    document.addEventListener("focusin", function (event) {
      var item = event.target.closest("[data-rove]");
      if (item && item.roving) stopAt(item);
    });
    document.querySelectorAll("nav.bd-links, #mg-contents").forEach(function (list) {
      var links = Array.from(list.querySelectorAll("a"));
      var here = links.findIndex(function (link) { return link.closest(".current"); });
      rove(links, Math.max(here, 0));
    });
    /* The words and names of a section with its buttons to copy; more than a few other links, too. */
    var homes = new Map();
    page.querySelectorAll("a[href], .copybtn").forEach(function (item) {
      if (item.closest("svg, .mg-player, .road-map, .start") || item.matches(".headerlink")) return;
      var home = item.closest("article > section > section") || page;
      var found = homes.get(home) || { small: [], links: [] };
      var small = item.matches(".term, .built, .copybtn, table a, [href*='glossary.html#']");
      found[small ? "small" : "links"].push(item);
      homes.set(home, found);
    });
    homes.forEach(function (found) {
      var items = found.small;
      if (found.links.length > 6) items = items.concat(found.links).sort(function (a, b) {
        return a.compareDocumentPosition(b) & Node.DOCUMENT_POSITION_FOLLOWING ? -1 : 1;
      });
      var first = items.findIndex(function (item) { return !item.closest("details"); });
      if (first >= 0) rove(items, first);
    });
    page.addEventListener("toggle", function (event) {
      event.target.querySelectorAll("[data-rove][tabindex='0']").forEach(function (item) {
        var open = item.roving.find(function (other) { return !other.closest("details"); });
        if (!item.checkVisibility() && open) stopAt(open);
      });
    }, true);
  }

  /* 4. How far one has read: a thin bar, and the entry of the contents at the right. */
  function reading(page) {
    var bar = document.createElement("div");
    bar.className = "mg-read";
    bar.setAttribute("aria-hidden", "true");
    document.body.append(bar);
    var links = Array.from(document.querySelectorAll("#mg-contents a[href^='#']"));
    var heads = links.map(function (link) {
      return document.getElementById(decodeURIComponent(link.hash.slice(1)));
    });
    var waiting = false, now = null;

    function look() {
      waiting = false;
      var all = root.scrollHeight - window.innerHeight;
      bar.style.transform = "scaleX(" + (all > 0 ? Math.min(1, window.scrollY / all) : 0) + ")";
      var line = (parseFloat(getComputedStyle(root).scrollPaddingTop) || 0) + 24;
      var found = null;
      heads.forEach(function (head, i) {
        if (head && head.getBoundingClientRect().top <= line) found = links[i];
      });
      if (all > 0 && window.scrollY >= all - 1) {
        /* At the end, what one jumped to may not have reached the top. */
        var aim = links.find(function (link) { return link.hash === location.hash; });
        var head = aim && heads[links.indexOf(aim)];
        if (head && head.getBoundingClientRect().top < window.innerHeight) found = aim;
      }
      if (found === now) return;
      now = found;
      links.forEach(function (link) {
        link.classList.toggle("active", link === now);
        if (link === now) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
        var entry = link.closest(".toc-entry");
        if (entry) entry.classList.toggle("active", Boolean(now) && entry.contains(now));
      });
      if (now && !document.activeElement.closest("#mg-contents")) {
        if (now.roving) stopAt(now);
        var list = now.closest(".bd-sidebar-secondary");
        if (list && list.scrollHeight > list.clientHeight) {
          var at = now.getBoundingClientRect(), room = list.getBoundingClientRect();
          if (at.top < room.top + 40 || at.bottom > room.bottom - 40) {
            list.scrollTop += at.top - room.top - room.height / 2;
          }
        }
      }
    }

    function soon() {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(look);
    }
    ["scroll", "resize", "hashchange"].forEach(function (kind) {
      window.addEventListener(kind, soon, { passive: true });
    });
    new ResizeObserver(soon).observe(page);
    look();
  }

  /* 5. Definitions at the word: the title of a link to the glossary or to a cell, at once, also by
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

    /* The first tap shows, the second follows the link. */
    var touched = false, known = false;
    page.addEventListener("pointerdown", function (event) {
      touched = event.pointerType === "touch";
      known = shown !== null && shown === event.target.closest("a.term, a.built");
    }, true);
    page.addEventListener("click", function (event) {
      var link = event.target.closest("a.term, a.built");
      if (!touched || !link) return;
      touched = false;
      if (known) return;
      event.preventDefault();
      show(link);
    });

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

  /* 6. What scrolls by itself can be scrolled by keyboard. Each box is measured in the frame in which
        it gets another size (a `resize` event comes before the layout), and so also when what it is
        folded away in opens. A table that doesn't fit on a phone becomes a card for each row. */
  function scrollers(page) {
    function measure(box) {
      var table = box.querySelector(":scope > table");
      if (table && window.innerWidth > PHONE) table.classList.remove("mg-cards");
      if (table && window.innerWidth <= PHONE && box.scrollWidth > box.clientWidth) cards(table);
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

  function cards(table) {
    var heads = Array.from(table.querySelectorAll("thead th"));
    if (!heads.length) return;
    table.classList.add("mg-cards");
    table.setAttribute("role", "table");
    table.querySelectorAll("tr").forEach(function (row) { row.setAttribute("role", "row"); });
    heads.forEach(function (head) { head.setAttribute("role", "columnheader"); });
    table.querySelectorAll("tbody tr").forEach(function (row) {
      Array.from(row.children).forEach(function (cell, i) {
        cell.setAttribute("role", "cell");
        if (heads[i]) cell.dataset.head = heads[i].textContent.trim();
      });
    });
  }

  /* 7. What is copied from a build cell builds where it is pasted: it has its directive again. */
  function directives(page) {
    page.querySelectorAll(".build-cell").forEach(function (cell) {
      var file = cell.querySelector(".build-file code");
      var code = cell.querySelector(".cell_input pre");
      if (!file || !code) return;
      var line = document.createElement("span");
      line.hidden = true;
      line.textContent = "#| build " + file.textContent + "\n";
      code.prepend(line);
    });
  }

  /* 8. The words that a search was for (search.js writes them into the address). Escape takes the
        marks away. */
  function marks(page) {
    var words = new URLSearchParams(location.search).get("mark");
    words = words && words.toLowerCase().split(" ").filter(Boolean);
    if (!words || !words.length || !window.Highlight || !CSS.highlights) return;
    var ranges = [], aim = null;
    var at = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    var home = at && (at.closest("section") || at);
    var walk = document.createTreeWalker(page, NodeFilter.SHOW_TEXT);
    for (var node = walk.nextNode(); node; node = walk.nextNode()) {
      if (node.parentElement.closest("svg, script, template, [hidden], button")) continue;
      var text = node.data.toLowerCase();
      words.forEach(function (word) {
        for (var i = text.indexOf(word); i >= 0; i = text.indexOf(word, i + word.length)) {
          var range = new Range();
          range.setStart(node, i);
          range.setEnd(node, i + word.length);
          ranges.push(range);
          var after = at && (at.contains(node)
            || at.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_FOLLOWING);
          if (!aim && after && home.contains(node)) aim = node.parentElement;
        }
      });
    }
    CSS.highlights.set("mg-mark", new Highlight(...ranges));
    document.addEventListener("keydown", function (event) {
      if (event.key === "Escape") CSS.highlights.delete("mg-mark");
    });
    if (!aim) return;
    for (var fold = aim.closest("details"); fold; fold = fold.parentElement.closest("details")) {
      fold.open = true;
    }
    /* Below the first screen, go there; the heading that the link leads to is seen otherwise. */
    window.addEventListener("load", function () {
      if (aim.getBoundingClientRect().bottom > window.innerHeight) {
        aim.scrollIntoView({ block: "center" });
      }
    });
  }

  function watch() {
    var page = document.querySelector("article") || document.body;
    tips(page);
    page.querySelectorAll(".mg-player").forEach(player);
    performance.mark("widgets-ready");
    frame(page);
    scrollers(page);
    groups(page);
    reading(page);
    directives(page);
    marks(page);
    window.addEventListener("resize", function () {
      page.querySelectorAll(".mg-stage").forEach(release);
      frame(page);
    });
  }

  /* 9. Print what is folded away as well. */
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
