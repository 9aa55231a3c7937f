/* Continues an operation on many rows, which takes several requests. Without scripts, people press the button. */
"use strict";

document.querySelector("[data-helix-continue]")?.requestSubmit();
