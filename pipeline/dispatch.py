"""From a request body to an event on its way to lookup: encode, store what is too big to travel, address, send."""

from __future__ import annotations

from pipeline import blob
from pipeline.bus import Bus
from pipeline.events import ENVELOPE_VERSION, Envelope, PromptEncoded, RequestBody
from pipeline.membership import Membership
from pipeline.request import Request
from pipeline.stage import CodecStage, Encoding
from pipeline.wire import encode


class Dispatcher:
    """Encodes requests and offers them to lookup workers."""

    def __init__(self, bus: Bus, membership: Membership, codec: CodecStage, epoch: int) -> None:
        self._bus = bus
        self._membership = membership
        self._codec = codec
        self._epoch = epoch
        self._limits = bus.topology.limits

    async def encode(self, request: Request) -> Encoding:
        """Run the codec stage on the body (fetched from BLOB if it is there).

        Raises: RequestError for the publisher's faults, TransientError when it cannot be done now.
        """
        head = request.head
        if head.blob:
            ref = blob.BlobRef.parse(head.blob)
            request.body = await blob.get(self._bus, head.tenant, head.rid, ref, self._limits.max_body_bytes)
        if len(request.body) > self._limits.max_body_bytes:
            raise blob.too_large(len(request.body), self._limits.max_body_bytes)
        event = RequestBody(head.rid, head.tenant, head.protocol, request.body)
        # to its end: a generator that is left unfinished costs a task that closes it
        encoding: Encoding
        [encoding] = [each async for each in self._codec.handle(event)]
        if len(encoding.ids) > self._limits.inline_ids_bytes and not encoding.too_long:
            stored = await blob.put(self._bus, head.tenant, head.rid, "ids", encoding.ids)
            request.ids_ref = stored.text()
            request.uses_blob = True
        return encoding

    def send(self, request: Request, encoding: Encoding, *, named: bool) -> None:
        """Offer a request to lookup's queue group, or (named) to one fresh worker after the other."""
        event = PromptEncoded(
            env=self._envelope(request, encoding),
            model=encoding.model,
            fingerprint=encoding.fingerprint,
            num_prompt_tokens=encoding.num_prompt_tokens,
            ids=b"" if request.ids_ref else encoding.ids,
            ids_ref=request.ids_ref,
            block_keys=encoding.block_keys,
            sampling=encoding.sampling,
            sender=self._bus.worker,
            spans=(request.spans["codec"],) if "codec" in request.spans else (),
            salt=encoding.salt,
        )
        self._bus.publish(self._subject(request, named=named), encode(event))
        self._bus.push()

    def _envelope(self, request: Request, encoding: Encoding) -> Envelope:
        return Envelope(
            version=ENVELOPE_VERSION,
            rid=request.rid,
            tenant=request.head.tenant,
            request_class=request.head.request_class,
            attempt=request.machine.attempt,
            deadline_ns=request.deadline_ns,
            owner=self._bus.worker,
            owner_epoch=self._epoch,
            handles=tuple(stream.handle for stream in request.streams),
            # hash of the rid when the request names none: every attempt and every owner uses the same
            seed=encoding.seed if encoding.seed is not None else int(request.rid[:16], 16),
            intake_ack=request.delivery.ack,
            plan=request.plan,
            forced_tokens=max((len(stream.tokens) for stream in request.streams), default=0),
        )

    def _subject(self, request: Request, *, named: bool) -> str:
        topology = self._bus.topology
        fresh = self._membership.fresh("lookup") if named else []
        workers = sorted(beacon.worker for beacon in fresh if beacon.worker not in request.dispatched_to)
        if not workers:
            request.dispatched_to = ()
            return topology.subject("encoded")
        worker = workers[int(request.rid[:8], 16) % len(workers)]
        request.dispatched_to = (*request.dispatched_to, worker)
        return topology.named("encoded", worker)
