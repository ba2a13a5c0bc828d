import{h as o,A as d}from"./index-BPyk15kC.js";var t=d('<div class="card">…</div>');function m(a){var r=t();o(a,r)}export{m as default};
