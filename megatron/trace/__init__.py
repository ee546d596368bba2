"""A trace of a few steps: what ran when, in a file for ui.perfetto.dev, and one line that says where the time went.

    recorder.py     what the engine says of itself meanwhile: where it is, what travels, when it waits
    stretches.py    stretches of time, and which of several kinds each moment belongs to
    events.py       the events of torch's trace, by name: products, attention, loss, what the device does
    shares.py       both -> the seconds of each kind
    tracks.py       what was recorded, as further tracks of the trace
    memory.py       memory over time, and where its peak is
    page.py         all of it as one page of HTML
    files.py        all of it as files, and the line that tells of them
    window.py       which steps, on which rank

Nothing is in the engine's way: it says where it is in any case (whereabouts.py, zero/exchanges.py), for somebody who
looks when it stands still. Not here: arithmetic counted module by module (profiler/).
"""
