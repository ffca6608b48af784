// The tool loop of openai_loop.py in another language: node, with npm's openai. Its reward is a file.

const fs = require("fs");
const OpenAI = require("openai");

const NUMBERS = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] };
const TOOL = { name: "multiply", description: "The product of two integers.", parameters: NUMBERS };

function multiply(text) {
  try {
    const { a, b } = JSON.parse(text);
    if (Number.isInteger(a) && Number.isInteger(b)) return String(a * b);
  } catch {}
  return "error: two integers are needed"; // the policy's mistake, which it should see
}

async function main() {
  const task = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
  const client = new OpenAI(); // its URL and the key are in the environment
  const messages = [...task.prompt];
  const tools = [{ type: "function", function: TOOL }];
  let message;
  for (let turn = 0; turn < 3; turn++) {
    const done = await client.chat.completions.create({ model: "policy", messages, tools, max_tokens: 64 });
    message = done.choices[0].message;
    messages.push(message);
    if (!message.tool_calls?.length) break;
    for (const call of message.tool_calls)
      messages.push({ role: "tool", tool_call_id: call.id, content: multiply(call.function.arguments) });
  }
  const text = message.content ?? "";
  fs.writeFileSync(process.env.REWARD_FILE, JSON.stringify(Number(text.includes(task.answer)) - text.length / 1000));
}

main();
