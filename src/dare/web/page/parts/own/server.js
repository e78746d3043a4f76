// Asks the server for what belongs to the reader's own models.

export const addressOf = (path) => new URL(`../../api/own/${path}`, import.meta.url).href;

/** The answer to a question; with a body it is a POST. An Error has the server's message. */
export async function ask(path, body, signal) {
  const post = { method: "POST", headers: { "Content-Type": "application/json" } };
  const sent = body === undefined ? {} : { ...post, body: JSON.stringify(body) };
  let response;
  try {
    response = await fetch(addressOf(path), { ...sent, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer.");
  }
  const unreadable = { error: `The server answered ${response.status}.` };
  const answer = await response.json().catch(() => unreadable);
  if (!response.ok) throw new Error(answer.error);
  return answer;
}
