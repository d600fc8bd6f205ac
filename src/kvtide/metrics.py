"""Everything kvtide counts, in one list: telemetry exports it, and the documentation is made of it.

Where something is counted its name stands as a literal; a test holds those names and this list to
each other.
"""

from __future__ import annotations

from collections.abc import Mapping

COUNTERS: Mapping[str, str] = {
    # Saving, as the scheduler side sees it.
    "store_jobs": "Store jobs handed to the workers.",
    "boundary_jobs": "Jobs for states (and what goes with them) that the engine handed off.",
    "lost_boundaries": "States or proofs that were not saved: no budget, a back-off or a failure.",
    "skipped_null_chunks": "Chunks worth storing that had no block any more.",
    "given_up_tokens": "Tokens in whole units that no job had taken when their request ended.",
    "repairs": "Requests saved from token 0, because the store lacked what the engine holds.",
    "pool_back_offs": "Store jobs after which all saving paused: no space, or the store is lost.",
    # Saving, per rank.
    "stored_jobs": "Store jobs whose every chunk is in the store.",
    "refused_jobs": "Store jobs for which staging or the put queue had no room.",
    "no_space_jobs": "Store jobs with a chunk that the store had no room for.",
    "failed_jobs": "Store jobs with a chunk that could not be written, or past their deadline.",
    "lost_jobs": "Store jobs whose store call failed as a whole, or outlived their deadline.",
    "expired_jobs": "Store jobs ended by their deadline (they are failed or lost ones too).",
    "existing_chunks": "Chunks found in the store already (mooncake:// counts them as written).",
    "saved_chunks": "Chunks written to the store, or found there by the put itself (mooncake://); "
    "of a chunk on several ranks, each part.",
    "saved_bytes": "Bytes of the saved chunks, tags included.",
    # Lookups.
    "lookups": "Lookups begun: for requests that come or are preempted, or lose local blocks.",
    "lookup_waits_expired": "Lookups whose answer a request stopped waiting for (lookup_wait_ms).",
    "lookups_timed_out": "Lookups abandoned because the store took too long (lookup_timeout_ms).",
    "lookups_refused": "Lookups taken as a miss at once: too many, or the store hangs.",
    "lookup_errors": "Lookups taken as a miss because the store raised.",
    "looked_up_keys": "Keys that lookups asked the store for.",
    # Loading, as the scheduler side sees it.
    "promises_withdrawn": "Hits offered to the engine that it did not admit for too long.",
    "load_jobs": "Load jobs handed to the workers.",
    "loaded_tokens": "Tokens whose KV cache was loaded from the store instead of computed.",
    "failed_loads": "Loads that failed, so that the engine recomputed (lost ones included).",
    "lost_loads": "Failed loads whose store call raised or came too late.",
    "refused_loads": "Loads the engine granted without a promise; they fail and are recomputed.",
    "load_suspensions": "Times at which loads paused after a lost one.",
    # Loading, per rank.
    "loaded_chunks": "Chunks loaded into the engine's blocks; of one on several ranks, each part.",
    "loaded_bytes": "Bytes loaded into the engine's blocks, tags not included.",
    "missing_chunks": "Chunks that a load asked for and the store had no more.",
    "unread_chunks": "Chunks that a load asked for and the store failed to read.",
    "bad_values": "Values read from the store that did not verify.",
    "blocked_chunks": "Chunks of a load without a usable target block.",
    "cancelled_loads": "Loads ended early because their request was aborted.",
    "expired_loads": "Loads ended by their deadline (they are lost ones too).",
    # The store itself, in whichever process calls it.
    "store_outages": "Times the store was found lost; it is probed for until it is back.",
    "refused_store_calls": "Store calls that failed at once, for the store is known to be lost.",
    "failed_transfers": "Values that did not travel: the store's owner of that memory is gone.",
    "refused_by_lease": "Removals refused because some reader held a lease on the value.",
    "expired_leases": "Reads that took longer than the lease on the value, and so failed.",
    # Both.
    "unnamed_requests": "Requests that neither save nor load, since no key can name their bytes.",
    "resets": "Resets of the cache: the weights may have changed.",
}
"""The counters by name, with what they count. None ever goes down."""

GAUGES: Mapping[str, str] = {
    "jobs_open": "Store jobs that have not ended on every rank.",
    "blocks_pinned": "Blocks of the engine that store jobs hold.",
}
"""What the statistics file shows of the present moment, beside the counters."""
