// The AI SDK of Vercel: text, streams, an agent's loop of calls and results, objects by a schema. argv: the server's URL.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import { z } from "zod";

const provider = createOpenAICompatible({ name: "iec", baseURL: process.argv[2] + "/v1", supportsStructuredOutputs: true });
const model = provider("weather");
const story = provider("story");
const tools = {
  get_weather: tool({
    description: "Tells the weather",
    inputSchema: z.object({ city: z.string(), tags: z.record(z.string(), z.number()).optional() }),
    execute: async ({ city }) => ({ city, weather: "rain" }),
  }),
};
const ask = { model, prompt: "What is the weather in Oslo?", tools, stopWhen: stepCountIs(4), temperature: 0 };

const whole = await generateText(ask);
assert.equal(whole.text, "It rains in Norway's capital.");
assert.equal(whole.steps.length, 2);
assert.deepEqual(whole.steps[0].toolCalls[0].input, { city: "Oslo" });

const streamed = streamText(ask);
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert.equal(text, whole.text);
assert.equal((await streamed.steps).length, 2);

const schema = z.object({ name: z.enum(["Ann", "Bob"]), age: z.number().int().min(1).max(9), born: z.string().date().nullable() });
const { output } = await generateText({ model: story, prompt: "Once", temperature: 0, maxOutputTokens: 300, output: Output.object({ schema }) });
schema.parse(output);
console.log("text, stream, calls with results, an object by a schema");
