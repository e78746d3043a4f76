// Nothing can be picked here.
"use strict";
darePage.drawAll();
