// OpenAI's own client of Node.
import { appendFileSync, readFileSync } from "node:fs";
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const set = process.env;
const options = { apiKey: "none", maxRetries: 0 };
const client = new OpenAI({ baseURL: set.VSCHED_TEXT_URL, ...options });
const vision = new OpenAI({ baseURL: set.VSCHED_VISION_URL, ...options });
const model = "smollm2";
const capital = [{ role: "user", content: "What is the capital of France?" }];
const City = z.object({ name: z.string().max(20), size: z.enum(["small", "large"]) });
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 }, unit: { enum: ["celsius", "fahrenheit"] } },
  required: ["city", "unit"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "get_weather", parameters, strict: true } };
const weather = [{ role: "user", content: "What is the weather in Paris, in celsius?" }];

const checks = {
  async chat() {
    const reply = await client.chat.completions.create({ model, messages: capital, temperature: 0, max_tokens: 30 });
    assert.match(reply.choices[0].message.content, /Paris/);
  },
  async stream() {
    const asked = { model, messages: capital, temperature: 0, max_tokens: 30, stream: true };
    let text = "";
    for await (const chunk of await client.chat.completions.create(asked)) {
      text += chunk.choices[0]?.delta.content ?? "";
    }
    assert.match(text, /Paris/);
  },
  async parse() {
    const reply = await client.chat.completions.parse({
      model,
      messages: [{ role: "user", content: "Describe Paris as JSON." }],
      response_format: zodResponseFormat(City, "city"),
      temperature: 0,
      max_tokens: 200,
    });
    assert.ok(["small", "large"].includes(reply.choices[0].message.parsed.size));
  },
  async tools() {
    const named = { type: "function", function: { name: "get_weather" } };
    const asked = { model, messages: weather, tools: [tool], tool_choice: named, temperature: 0, max_tokens: 100 };
    const reply = await client.chat.completions.stream(asked).finalChatCompletion();
    const call = reply.choices[0].message.tool_calls[0].function;
    assert.deepEqual(Object.keys(JSON.parse(call.arguments)), ["city", "unit"]);
  },
  async run_tools() {
    let called = 0;
    const runner = client.chat.completions.runTools({
      model,
      messages: weather,
      tools: [{ type: "function", function: { ...tool.function, parse: JSON.parse, function: () => `${++called} degrees` } }],
      tool_choice: { type: "function", function: { name: "get_weather" } },
      temperature: 0,
      max_tokens: 100,
    });
    await runner.done();
    assert.equal(called, 1);
  },
  async responses() {
    const asked = { model, input: "What is the capital of France?", temperature: 0, max_output_tokens: 30, store: false };
    assert.match((await client.responses.create(asked)).output_text, /Paris/);
    const streamed = await client.responses.stream(asked).finalResponse();
    assert.match(streamed.output_text, /Paris/);
  },
  async images() {
    const url = `data:image/png;base64,${readFileSync(set.VSCHED_PICTURE).toString("base64")}`;
    const content = [
      { type: "image_url", image_url: { url } },
      { type: "text", text: set.VSCHED_PICTURE_QUESTION },
    ];
    const messages = [{ role: "user", content }];
    const reply = await vision.chat.completions.create({ model: "demo", messages, temperature: 0, max_tokens: 10 });
    assert.equal(reply.choices[0].message.content.trim(), set.VSCHED_PICTURE_ANSWER);
  },
  async errors() {
    const messages = [{ role: "user", content: "word ".repeat(Number(set.VSCHED_TEXT_CONTEXT) + 100) }];
    await assert.rejects(client.chat.completions.create({ model, messages }), (error) => {
      assert.equal(error.code, "context_length_exceeded");
      assert.ok(error.requestID);
      return error instanceof OpenAI.BadRequestError;
    });
  },
};

for (const [check, run] of Object.entries(checks)) {
  let error = "";
  try {
    await run();
  } catch (failure) {
    console.error(failure);
    error = String(failure);
  }
  appendFileSync(process.argv[2], JSON.stringify({ check, error }) + "\n");
}
