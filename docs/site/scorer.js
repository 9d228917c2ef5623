/* How results of the search are ordered: pages whose title has words of the query come first, then
   sections whose heading has them. Pages that mention everything come after those about it. */

const endings = /(ations?|ings?|ates?|e?s|e)$/;
const stemsOf = (text) =>
  (text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || []).map((word) =>
    word.length > 4 ? word.replace(endings, "") : word,
  );
const asked = new URLSearchParams(window.location.search).get("q") || "";
const wanted = stemsOf(asked);

var Scorer = {
  score: ([page, title, , , score]) => {
    const [ofPage, ...ofSection] = title.split(" > ");
    const count = (text) => {
      const stems = stemsOf(text);
      return wanted.filter((word) => stems.includes(word)).length;
    };
    const heading = ofSection.join(" ");
    const name = asked.trim().toLowerCase();
    const isHeading = heading.toLowerCase() === name;
    const isObject = ofPage.toLowerCase().endsWith(`.${name}`);
    const isBroad = /^(index|changes|contributing|benchmarks.*|api\/index)$/.test(page);
    const isOfStreams = page.includes("_of_streams");
    return (
      score +
      30 * count(ofPage) +
      10 * count(heading) +
      (isHeading || isObject ? (isOfStreams ? (isObject ? -30 : 10) : 40) : 0) -
      (isBroad ? 45 : 0) -
      (page.startsWith("api/") ? 20 : 0)
    );
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
