"""A history as an ASCII timeline: a column for each actor, a row for each event, time running down."""


class Timeline:
    """say() gets each row as it happens: print, or hypothesis's note(), which shows those of the shrunk failure alone."""

    def __init__(self, say, width=30):
        self.say, self.width, self.lanes, self.n = say, width, [], 0

    def event(self, actor, text, ends=False):
        """Put an event into an actor's column; a new actor gets the next free column, one that ends gives its own back."""
        if actor not in self.lanes:
            if None in self.lanes:
                self.lanes[self.lanes.index(None)] = actor
            else:
                self.lanes.append(actor)
        at = self.lanes.index(actor)
        self.n += 1
        cells = [f"{actor}: {text}" if i == at else "" if lane is None else "|" for i, lane in enumerate(self.lanes)]
        self.say(f"{self.n:4}  " + "".join(cell.ljust(self.width) for cell in cells).rstrip())
        if ends:
            self.lanes[at] = None
