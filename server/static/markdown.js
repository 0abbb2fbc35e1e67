// A model's text as DOM nodes: the Markdown that models write, and nothing else.
// Everything becomes text nodes of elements made here, so no text of a model is ever read as HTML.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/;
const INLINE = new RegExp(
  [
    "(`+)(.+?)\\1(?!`)",                                    // 1 2: code
    "\\*\\*(?=\\S)(.+?\\S|\\S)\\*\\*",                      // 3: strong
    "(?<![\\w*])\\*(?=[^\\s*])([^*]*?[^\\s*])\\*(?![\\w*])", // 4: emphasis
    "(?<!\\w)_(?=[^\\s_])([^_]*?[^\\s_])_(?!\\w)",          // 5: emphasis
    "~~(?=\\S)(.+?)~~",                                     // 6: struck out
    "!?\\[([^\\]\\n]*)\\]\\((https?://[^\\s()]+)\\)",       // 7 8: link
    "(https?://[^\\s<>()\"']*[^\\s<>()\"'.,;:!?])",         // 9: bare link
  ].join("|"),
  "s",
);
const MAX_DEPTH = 8;  // of quotes in quotes and emphasis in emphasis

export function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// Replaces what is in `target`.
export function render(target, text) {
  target.replaceChildren(...blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0));
}

function blocks(lines, depth) {
  const made = [];
  let at = 0;
  while (at < lines.length) {
    const [node, next] = block(lines, at, depth);
    if (node) made.push(node);
    at = next;
  }
  return made;
}

// The block that begins at line `at`, and the line after it.
function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence[1], fence[2].trim());
  const heading = HEADING.exec(line);
  if (heading) {
    const level = Math.min(heading[1].length + 2, 5);  // the page has its own h1 and h2
    return [element(`h${level}`, "", ...inline(heading[2], 0)), at + 1];
  }
  if (RULE.test(line)) return [element("hr"), at + 1];
  if (ITEM.test(line)) return list(lines, at, depth);
  if (QUOTE.test(line) && depth < MAX_DEPTH) return quote(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

function startsBlock(lines, at) {
  const line = lines[at];
  return !line.trim() || [FENCE, HEADING, RULE, ITEM, QUOTE].some((re) => re.test(line))
    || isTable(lines, at);
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !startsBlock(lines, end)) end++;
  return [element("p", "", ...inline(lines.slice(at, end).join("\n").trim(), depth)), end];
}

function code(lines, at, mark, language) {
  const close = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end++;
  const content = lines.slice(at + 1, end).join("\n");
  const copy = element("button", "small", "Copy");
  copy.type = "button";
  copy.dataset.copy = "block";
  const head = element("div", "block-head", element("span", "", language || "text"), copy);
  const pre = element("pre", "", element("code", "", content));
  pre.tabIndex = 0;  // so that a keyboard can scroll it
  return [element("div", "block", head, pre), end + 1];
}

function quote(lines, at, depth) {
  const inner = [];
  let end = at;
  for (let match; end < lines.length && (match = QUOTE.exec(lines[end])); end++) inner.push(match[1]);
  return [element("blockquote", "", ...blocks(inner, depth + 1)), end];
}

// Items of the first one's indent; what is indented further belongs to the item before.
function list(lines, at, depth) {
  const [, indent, number] = ITEM.exec(lines[at]);
  const made = element(number ? "ol" : "ul");
  if (number) made.start = Number(number);
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    if (!match || match[1].length > indent.length + 1 || Boolean(match[2]) !== Boolean(number)) break;
    if (match[1].length + 1 < indent.length) break;
    const inner = [match[3]];
    end++;
    while (end < lines.length && belongs(lines, end, indent.length)) inner.push(lines[end++].replace(/^\s{1,4}/, ""));
    made.append(element("li", "", ...item(inner, depth)));
    if (end < lines.length && !lines[end].trim() && ITEM.test(lines[end + 1] ?? "")) end++;
  }
  return [made, end];
}

function belongs(lines, at, indent) {
  if (!lines[at].trim()) return /^\s+\S/.test(lines[at + 1] ?? "") && !ITEM.test(lines[at + 1]);
  const match = ITEM.exec(lines[at]);
  if (match) return match[1].length > indent + 1;
  return /^\s/.test(lines[at]) || !startsBlock(lines, at);
}

// An item of one paragraph is not set apart as one.
function item(lines, depth) {
  if (depth >= MAX_DEPTH) return inline(lines.join("\n"), 0);
  const made = blocks(lines, depth + 1);
  return made[0]?.tagName === "P" ? [...made[0].childNodes, ...made.slice(1)] : made;
}

function isTable(lines, at) {
  return lines[at].includes("|") && TABLE_RULE.test(lines[at + 1] ?? "");
}

function table(lines, at) {
  const row = (line, cell) => {
    const cells = line.trim().replace(/^\||\|$/g, "").split("|");
    return element("tr", "", ...cells.map((text) => element(cell, "", ...inline(text.trim(), 0))));
  };
  const body = element("tbody");
  let end = at + 2;
  for (; end < lines.length && lines[end].includes("|"); end++) body.append(row(lines[end], "td"));
  const whole = element("table", "", element("thead", "", row(lines[at], "th")), body);
  return [element("div", "wide-table", whole), end];
}

function inline(text, depth) {
  const made = [];
  let match;
  while (text && depth < MAX_DEPTH && (match = INLINE.exec(text))) {
    if (match.index) made.push(text.slice(0, match.index));
    made.push(span(match, depth));
    text = text.slice(match.index + match[0].length);
  }
  if (text) made.push(text);
  return made;
}

function span([whole, ticks, code, strong, starred, lined, struck, label, link, bare], depth) {
  if (ticks) return element("code", "", code.trim() || code);
  if (strong) return element("strong", "", ...inline(strong, depth + 1));
  if (starred || lined) return element("em", "", ...inline(starred || lined, depth + 1));
  if (struck) return element("s", "", ...inline(struck, depth + 1));
  const target = link || bare;
  if (!target) return whole;
  const made = element("a", "", label || target);  // also for images: nothing is fetched unasked
  made.href = target;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}
