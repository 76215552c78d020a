/* Search, on its page only (course/book/extension.py): the glossary's entry of a word comes first, what is shown
   of a page is text of the article, and a result leads to the section where the words stand and marks
   them there (course.js). Runs before Sphinx's searchtools.js, and changes what that has set up. */

(function () {
  "use strict";

  var GLOSSARY = "book/glossary", ROOM = 240, BEFORE = 80;
  var wanted = "";
  var marked = [];

  function plain(text) {
    var box = new DOMParser().parseFromString(text, "text/html");
    return box.body.textContent.toLowerCase().replace(/[\s-]+/g, " ").trim();
  }

  function stem(text) {
    return text.split(" ").map(function (word) { return new Stemmer().stemWord(word); }).join(" ");
  }

  /* Sphinx asks for this: [page, title, anchor, description, score, file] to a score. */
  window.Scorer = {
    objNameMatch: 11,
    objPartialMatch: 6,
    objPrio: { 0: 15, 1: 5, 2: -5 },
    objPrioDefault: 0,
    title: 15,
    partialTitle: 7,
    term: 5,
    partialTerm: 2,
    score: function (result) {
      var page = result[0], score = result[4];
      if (result[3]) {
        /* A name of the package: exactly as it was typed, or but for capitals and underscores. */
        var name = result[1].split(".").pop();
        if (name === wanted) return 60 + score;
        return name.toLowerCase() === wanted.toLowerCase() ? 30 + score : score;
      }
      var title = plain(result[1].split(" > ").pop());
      var same = title === plain(wanted) || stem(title) === stem(plain(wanted));
      if (page === GLOSSARY && result[2]) return same ? 1000 : 40 + score;
      return same && result[2] ? 50 + score : score;
    },
  };

  function article(text, all) {
    var page = new DOMParser().parseFromString(text, "text/html");
    var found = page.querySelector("article");
    if (!found) return null;
    found.querySelectorAll(
      "nav, script, style, template, button, svg, .headerlink, .mg-bar, .mg-choice, .mg-paper, "
      + ".prev-next-area, .build-file, summary, .toctree-wrapper"
      + (all ? "" : ", .cell_input, details")
    ).forEach(function (part) { part.remove(); });
    return found;
  }

  /* The text of a section without its heading and without the sections in it. */
  function own(section) {
    var copy = section.cloneNode(true);
    copy.querySelectorAll(":scope section, :scope > :is(h1, h2, h3, h4)").forEach(function (part) {
      part.remove();
    });
    return copy.textContent.replace(/\s+/g, " ").trim();
  }

  function places(text, words) {
    var low = text.toLowerCase();
    return words.map(function (word) { return low.indexOf(word); })
      .filter(function (at) { return at >= 0; });
  }

  function often(text, words) {
    var low = text.toLowerCase();
    return words.reduce(function (sum, word) { return sum + low.split(word).length - 1; }, 0);
  }

  /* The section that holds most of the words, and of several the one that holds them most often. */
  function best(page, words) {
    var found = null, most = 0;
    page.querySelectorAll("section[id]").forEach(function (section) {
      var head = section.querySelector(":scope > :is(h1, h2, h3, h4)");
      var title = head ? head.textContent : "";
      var said = title + " " + own(section);
      var count = 10 * places(said, words).length + Math.min(9, often(said, words))
        + 3 * places(title, words).length;
      if (count > most) {
        most = count;
        found = section;
      }
    });
    return found;
  }

  function summary(text, stems, anchor) {
    var page = article(text);
    if (!page) return document.createElement("p");
    var words = marked.concat(Array.from(stems));
    var at = anchor ? page.querySelector("#" + CSS.escape(anchor.slice(1))) : null;
    var section = anchor ? at && (at.closest("section") || at) : best(page, words);
    if (!section) {
      /* Only in code or in an answer: there is the place, and what is shown is the text around. */
      var place = best(article(text, true), words);
      section = place && page.querySelector("#" + CSS.escape(place.id));
    }
    if (!section) return document.createElement("p");
    var said = own(section);
    var first = places(said, words).sort(function (a, b) { return a - b; })[0] || 0;
    var start = first > BEFORE ? said.indexOf(" ", first - BEFORE) + 1 : 0;
    var shown = document.createElement("p");
    shown.className = "context";
    shown.textContent = (start ? "… " : "") + said.slice(start, start + ROOM).trim()
      + (start + ROOM < said.length ? " …" : "");
    var head = section.querySelector(":scope > :is(h2, h3, h4)");
    if (!anchor && head) {
      shown.dataset.anchor = "#" + section.id;
      shown.dataset.title = head.textContent.trim();
    }
    return shown;
  }

  /* Finish each result as it arrives: its link to the section, with the words to mark. */
  function finish(list) {
    new MutationObserver(function () {
      list.querySelectorAll("li").forEach(function (item) {
        var link = item.querySelector("a"), shown = item.querySelector("p.context[data-anchor]");
        var parts = link.getAttribute("href").split("#");
        if (parts[0].indexOf("?") < 0) {
          parts[0] += "?mark=" + encodeURIComponent(marked.join(" "));
          link.setAttribute("href", parts.join("#"));
        }
        if (shown && parts.length < 2) {
          link.setAttribute("href", parts[0] + shown.dataset.anchor);
          link.append(" > " + shown.dataset.title);
          delete shown.dataset.anchor;
        }
      });
    }).observe(list, { childList: true, subtree: true });
  }

  document.addEventListener("DOMContentLoaded", function () {
    if (typeof Search === "undefined") return;
    var parse = Search._parseQuery, find = Search._performSearch;
    Search._parseQuery = function (query) {
      var parsed = parse(query);
      /* Sphinx would mark the words in the next page's menus, too. */
      localStorage.removeItem("sphinx_highlight_terms");
      marked = Array.from(parsed[3]);
      return parsed;
    };
    Search._performSearch = function (query) {
      wanted = query.trim();
      var found = find.apply(Search, arguments);
      /* Sphinx looks for titles that contain what was typed; `pages` is `page`. */
      var index = Search._index, number = index.docnames.indexOf(GLOSSARY);
      Object.keys(index.alltitles).forEach(function (title) {
        index.alltitles[title].forEach(function (place) {
          if (place[0] !== number || place[1] === null) return;
          if (stem(plain(title)) !== stem(plain(wanted))) return;
          var full = index.titles[number] + " > " + title;
          found = found.filter(function (item) {
            return item[0] !== GLOSSARY || (item[2] && item[2] !== "#" + place[1]);
          });
          found.push([GLOSSARY, full, "#" + place[1], null, 1000, index.filenames[number]]);
        });
      });
      return found;
    };
    Search.makeSearchSummary = summary;
    var out = document.getElementById("search-results");
    if (!out) return;
    var wait = new MutationObserver(function () {
      var list = out.querySelector("ul.search");
      if (!list) return;
      wait.disconnect();
      finish(list);
    });
    wait.observe(out, { childList: true });
  });
})();
