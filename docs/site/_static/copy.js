/* A button in the corner of each block of code copies it, without prompts and what commands print. */

const textOf = (block) => {
  const lines = block.querySelector("pre").innerText.split("\n");
  if (!block.className.includes("highlight-console")) return lines.join("\n");
  const commands = [];
  let continues = false;
  for (const line of lines) {
    if (line.startsWith("$ ") || continues) {
      commands.push(continues ? line : line.slice(2));
      continues = line.endsWith("\\");
    }
  }
  return commands.join("\n");
};

document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div[class*='highlight-']:not(.highlight-text)")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy this code");
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(textOf(block));
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    block.append(button);
  }
});
