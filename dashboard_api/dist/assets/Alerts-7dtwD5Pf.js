import{h as o,A as t}from"./index-BPyk15kC.js";var d=t('<div class="card">…</div>');function i(a){var r=d();o(a,r)}export{i as default};
