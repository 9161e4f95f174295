"""The built-in prompts: real text of eight kinds, written for this project. Data only.

The kinds differ in how predictable their answers are: an extraction or a rewrite repeats much of
its prompt, a story or an opinion nothing. A figure from one kind alone says little about another.
"""

from __future__ import annotations

_MINUTES = (
    "Minutes, harbour committee, 4 March. Present: Ines Okafor (chair), Tom Reiter, Lucia Brandt, "
    "Pavel Novak. 1. The crane at berth 3 has been out of service since 17 February. Reiter got "
    "two offers: 18,400 euros from Hansen Lifting, six weeks, and 22,900 euros from Dockworks, ten "
    "days. The committee chose Dockworks because each idle week costs about 3,000 euros. 2. Brandt "
    "reported that fuel sales fell by 12 percent against last year, mostly because the ferry line "
    "now bunkers in the next port. She will visit the line's office before 20 March. 3. Novak "
    "asked for a second night watchman after three thefts of outboard motors. Agreed until the end "
    "of October, then to be looked at again. Next meeting: 1 April, 18:00, in the old customs "
    "house."
)

_LETTER = (
    "hi there, i bought the blue kettle from you guys like two weeks ago (order 77-1042) and it "
    "was great at first but now it wont switch off by itself anymore, it just keeps on boiling "
    "untill i pull the plug. thats kind of dangerous isnt it?? i still got the box and the bill. "
    "can you send me a new one or do i have to send this one back first, and who pays for that. "
    "would be nice to hear back before friday cause im travelling after that. thanks, marta"
)

_BEES = (
    "A colony of honey bees keeps the centre of its winter cluster at roughly 30 degrees even when "
    "it freezes outside. The bees do this without moving their wings: they uncouple the flight "
    "muscles from the wings and make them shiver. Bees at the edge pack tightly with their heads "
    "inward and form a living coat; when they cool down they work their way inside, and warmer "
    "ones take their place. The fuel is honey, and a strong colony uses ten to fifteen kilograms "
    "of it from November to March. Many colonies that die in late winter do not freeze, strictly "
    "speaking. They starve within reach of full combs, because in a long cold spell the cluster "
    "cannot move sideways to the next store of food."
)

_FUNCTION = """def report(rows):
    result = {}
    for r in rows:
        if r["city"] in result:
            result[r["city"]]["n"] = result[r["city"]]["n"] + 1
            result[r["city"]]["sum"] = result[r["city"]]["sum"] + r["amount"]
        else:
            result[r["city"]] = {"n": 1, "sum": r["amount"]}
    out = []
    for k in result.keys():
        out.append((k, result[k]["n"], result[k]["sum"], result[k]["sum"] / result[k]["n"]))
    out.sort(key=lambda x: x[2])
    out.reverse()
    return out"""

_LOG = """09:14:02 INFO  pump-2 started, pressure 2.1 bar
09:14:40 WARN  pump-2 pressure 3.8 bar above limit 3.5
09:15:05 ERROR pump-2 stopped by relief valve, pressure 4.2 bar
09:15:06 INFO  pump-1 started, pressure 2.0 bar
09:31:47 WARN  tank-B level 91 percent above limit 90
09:32:10 INFO  valve-7 opened by operator kim
09:40:33 INFO  tank-B level 84 percent"""

BUILT_IN: dict[str, tuple[str, ...]] = {
    "explain": (
        "Why does the Moon show us always the same side? Explain it to someone who left school "
        "long ago, step by step, and clear up the common belief that it does not rotate.",
        "Explain how a refrigerator moves heat from a cold place to a warm one, and why this "
        "does not contradict the second law of thermodynamics.",
        "What happens between typing an address into a browser and seeing the page? Cover name "
        "resolution, the connection, encryption and rendering, each in its own paragraph.",
        "How do vaccines train the immune system? Compare at least three kinds of vaccine and "
        "say what each of them shows to the body.",
        "Explain inflation with the example of a small town with one bakery, then tell what a "
        "central bank can do about it and what the side effects are.",
    ),
    "code": (
        "Write a Python class for a least-recently-used cache with a fixed capacity, using only "
        "the standard library. Add type hints, docstrings and a handful of unit tests.",
        "Write a function in Go that merges two sorted slices of integers into one without using "
        "the sort package, and explain its running time.",
        "Write an SQL query that lists, for each customer, the month with the highest sum of "
        "orders. The tables are customers(id, name) and orders(id, customer_id, placed_on, "
        "total). Explain each clause.",
        "Implement a tokenizer for arithmetic expressions in JavaScript: numbers with decimals, "
        "the four operators, parentheses and spaces. Report the position of a wrong character.",
        "Write a shell script that deletes all files older than thirty days from a folder, but "
        "first prints them and asks for confirmation. Comment every step.",
    ),
    "refactor": (
        "Rewrite this Python function so that it is short and clear, and keep its behaviour:\n\n"
        f"{_FUNCTION}",
        "Add type hints and a docstring to this function, and change nothing else. Print the "
        f"whole function:\n\n{_FUNCTION}",
        "Find the places where this function could fail on real data, and print a version that "
        f"handles them:\n\n{_FUNCTION}",
        "Translate this Python function to TypeScript, with an interface for the rows:\n\n"
        f"{_FUNCTION}",
        "Write pytest tests for the following function. Cover no rows, one row, several rows of "
        f"one city, and equal sums:\n\n{_FUNCTION}",
    ),
    "summary": (
        "Sum up the following minutes in three sentences for somebody who was not there:\n\n"
        f"{_MINUTES}",
        f"Summarize this text in one paragraph, then give five key words:\n\n{_BEES}",
        "Turn these minutes into a list of decisions and a list of open tasks with names and "
        f"dates:\n\n{_MINUTES}",
        "Make five quiz questions from this text, each with four answers of which one is right, "
        f"and give the solutions at the end:\n\n{_BEES}",
        "What went wrong in this plant this morning? Tell it in plain words, in the order of "
        f"time:\n\n{_LOG}",
    ),
    "extract": (
        "Extract all people, dates and amounts of money from this text as JSON with the keys "
        f"people, dates and amounts:\n\n{_MINUTES}",
        "Convert this log to a JSON array of objects with the keys time, level, unit and "
        f"message:\n\n{_LOG}",
        "Make a table in Markdown from this log with the columns time, unit, event and value:\n\n"
        f"{_LOG}",
        "List every number in the following text together with what it counts or measures:\n\n"
        f"{_BEES}",
        "Fill this form from the letter below. Order number: / Product: / Problem: / Wish: / "
        f"Answer needed by: / Name:\n\n{_LETTER}",
    ),
    "rewrite": (
        f"Correct spelling and punctuation of this letter, and keep its tone:\n\n{_LETTER}",
        f"Rewrite this letter in formal business English:\n\n{_LETTER}",
        f"Translate the following text to German:\n\n{_BEES}",
        f"Rewrite this text for children of eight years, with short sentences:\n\n{_BEES}",
        "Write a friendly answer to this letter in the name of the shop. A new kettle is on its "
        f"way, and the old one can be kept:\n\n{_LETTER}",
    ),
    "story": (
        "Write a short story about a lighthouse keeper who finds a letter in a bottle that is "
        "addressed to herself. Let it end without an explanation.",
        "Write a dialogue between an old bicycle and a new electric scooter that share a shed "
        "during one long winter.",
        "Tell the story of a chess game in a park from the point of view of a pawn that reaches "
        "the last row.",
        "Write a poem of five stanzas about the first train of the morning, with rhymes, and "
        "without the words train and morning.",
        "Invent a festival for a village in the mountains: its origin, its strangest custom, and "
        "what goes wrong this year.",
    ),
    "reason": (
        "A baker sells rolls at 45 cents and loaves at 3.20 euros. On Saturday she sold 214 "
        "pieces for 233.80 euros in all. How many of each did she sell? Show every step and "
        "check the result.",
        "Two trains leave towns 390 kilometres apart at 8:00 and 8:30 towards each other, at 90 "
        "and 120 kilometres an hour. When and where do they meet? Show your work.",
        "Ann, Ben, Cem and Dora sit in a row. Ann sits next to Ben but not next to Cem. Dora "
        "sits at an end. Find all possible orders and explain how you excluded the others.",
        "Plan a three-day visit to Lisbon for a family with two children and a budget of 600 "
        "euros without lodging. Give times, prices and a plan for rain.",
        "Should a small firm with twelve people write its own booking software or buy one? Weigh "
        "cost, risk and time, and end with a recommendation and the conditions under which it "
        "would change.",
    ),
}
