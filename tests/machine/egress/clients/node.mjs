// What Node's fetch sees where allowed.example was named, and a secret for api.example.
const headers = { Authorization: `Bearer ${process.env.TOKEN}` };
console.log((await fetch("https://api.example/show", { headers })).status);
const text = async (answer) => (await answer).text();
console.log((await text(fetch("https://allowed.example/"))).trim());
console.log((await text(fetch("http://allowed.example/"))).trim());
const body = "x".repeat(100000);
console.log((await text(fetch("https://allowed.example/", { method: "POST", body }))).length);
const several = await Promise.all(Array.from({ length: 8 }, () => text(fetch("https://allowed.example/"))));
console.log(new Set(several).size);
for (const url of ["https://denied.example/", "http://allowed.example/redirect"]) {
  const began = performance.now();
  try {
    console.log(await text(fetch(url)));
  } catch (error) {
    console.log(error.cause.code, performance.now() - began < 5000);
  }
}
