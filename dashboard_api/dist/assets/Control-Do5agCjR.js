import{h as r,A as t}from"./index-BPyk15kC.js";var d=t('<div class="card">…</div>');function s(a){var o=d();r(a,o)}export{s as default};
