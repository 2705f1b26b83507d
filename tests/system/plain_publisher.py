import asyncio
import json
import secrets
import sys

import nats


async def follow(url, rid, body, number, stop):
    nc = await nats.connect(url)
    events = await nc.subscribe(inbox := nc.new_inbox())

    async def want(subject, resend):  # acknowledgement, credit, resume and sign of life at once
        fields = {"rid": rid, "next": number, "window_bytes": 1 << 20, "reply": inbox, "resend": resend}
        await nc.publish(subject, json.dumps(fields).encode())

    if body:  # a second message with the same id would be dropped
        headers = {"Nats-Msg-Id": f"default:{rid}", "Tm-Reply": inbox}
        await nc.jetstream().publish("v1.in.interactive.default", json.dumps(body).encode(), headers=headers)
    else:
        await want("v1.want", True)  # whoever owns the request answers with its events from `number` on
    while number != stop:
        event = json.loads((message := await events.next_msg(timeout=60)).data)
        if event.get("n") == number:  # else: a note without a number, an event that we have, or one after a gap
            print(number, json.dumps(event["event"]))
            number, stop = number + 1, number + 1 if "end" in event else stop
        await want(message.reply or "v1.want", event.get("n", 0) > number)
    await nc.close()
    return number


async def main(url):
    question = {"role": "user", "content": "How does a tide mill work?"}
    body = {"model": "deepseek-v4.1-flash", "messages": [question], "stream": True, "max_tokens": 32}
    number = await follow(url, rid := secrets.token_hex(16), body, 0, stop=8)
    await follow(url, rid, None, number, stop=None)


asyncio.run(main(sys.argv[1]))
