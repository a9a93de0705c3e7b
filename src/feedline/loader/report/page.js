// A tap on a block shows its title, as a pointer does.
document.querySelectorAll("svg.time").forEach((svg) => {
  const note = document.createElement("p");
  note.textContent = "Tap a block for its batch and duration.";
  svg.parentElement.after(note);
  svg.addEventListener("click", (event) => {
    const title = event.target.querySelector && event.target.querySelector("title");
    if (title) note.textContent = title.textContent;
  });
});
