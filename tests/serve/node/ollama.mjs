// The client `ollama` of npm: lists, shows, talks, generates, calls functions, keeps to a schema. argv: the server's URL.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const api = new Ollama({ host: process.argv[2] });
assert.ok((await api.version()).version);
const { models } = await api.list();
assert.ok(models.some((model) => model.name.startsWith("weather")), "a model in the list");
assert.ok((await api.show({ model: "weather" })).details.family);
await api.ps();

const messages = [{ role: "user", content: "Tell me" }];
const options = { temperature: 0, num_predict: 40 };
const whole = await api.chat({ model: "weather", messages, options });
assert.equal(whole.message.content, "It rains in Norway's capital.");
assert.ok(whole.done && whole.eval_count > 0 && whole.total_duration > 0);
let text = "";
let last;
for await (const part of await api.chat({ model: "weather", messages, options, stream: true })) {
  text += part.message.content;
  last = part;
}
assert.equal(text, whole.message.content);
assert.equal(last.done_reason, "stop");

const parameters = { type: "object", required: ["city"], properties: { city: { type: "string", description: "City" } } };
const tools = [{ type: "function", function: { name: "get_weather", description: "Tells the weather", parameters } }];
const called = await api.chat({ model: "weather", messages, tools, options });
assert.deepEqual(called.message.tool_calls[0].function.arguments, { city: "Oslo" });
const history = [...messages, called.message, { role: "tool", tool_name: "get_weather", content: "rain" }];
assert.equal((await api.chat({ model: "weather", messages: history, tools, options })).message.content, whole.message.content);

const format = { type: "object", required: ["n"], properties: { n: { type: "integer", minimum: 1, maximum: 9 } }, additionalProperties: false };
const object = await api.chat({ model: "story", messages, format, options: { temperature: 0, num_predict: 200 } });
assert.ok(Number.isInteger(JSON.parse(object.message.content).n));

const plain = await api.generate({ model: "story", prompt: "Once upon a time", options: { temperature: 0, num_predict: 12 } });
assert.ok(plain.response.length > 0 && plain.eval_count === 12);
await assert.rejects(api.chat({ model: "absent", messages }), /absent/);
console.log("lists, show, talk, streams, calls with results, a schema, generate, an error");
