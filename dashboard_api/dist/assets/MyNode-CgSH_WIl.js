import{h as r,A as d}from"./index-BPyk15kC.js";var t=d('<div class="card">…</div>');function s(a){var o=t();r(a,o)}export{s as default};
