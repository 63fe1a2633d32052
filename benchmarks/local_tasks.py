"""What `make eval-local` asks of a very small model: questions, tools, and what is right.

The tools are plain functions over the data in this file, so a call gives the same every time. The
tasks were written by somebody who had seen neither the prompt nor the model: what a person would
type, not what the model is good at. This module knows nothing of either.

Where a tool is needed, a right answer holds something that neither the question nor an earlier
result says, so that echoing does not count. `python -m benchmarks.local_tasks` tells what is wrong
with the tasks themselves.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from datetime import date
from math import isclose
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from clark_agent import FunctionTool, ToolExecutionError, tool

Unit: TypeAlias = Literal["km", "miles", "kg", "pounds", "celsius", "fahrenheit"]
Day: TypeAlias = Literal["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]

# --- the data ---------------------------------------------------------------------------------

POPULATIONS = {
    "brazil": "203 million",
    "canada": "40 million",
    "chile": "20 million",
    "egypt": "112 million",
    "france": "68 million",
    "japan": "124 million",
    "kenya": "55 million",
    "norway": "5.5 million",
}
FACTORS = {("km", "miles"): 0.621371, ("kg", "pounds"): 2.204623}
PHONES = {
    "ida brandt": "555-0142",
    "tom okafor": "555-0187",
    "lucia reyes": "555-0119",
    "sam whitlock": "555-0163",
    "the library": "555-0101",
    "the dentist": "555-0176",
}
STOCK = {
    ("hammer", "main"): 58,
    ("hammer", "north"): 36,
    ("hammer", "south"): 14,
    ("ladder", "main"): 23,
    ("ladder", "north"): 5,
    ("ladder", "south"): 9,
    ("drill", "main"): 71,
    ("drill", "north"): 18,
    ("drill", "south"): 0,
    ("rope", "main"): 130,
    ("rope", "north"): 64,
    ("rope", "south"): 27,
}
TRAINS = {
    ("leeds", "york"): ("07:12", "09:42", "14:25", "18:05"),
    ("york", "leeds"): ("06:50", "12:31", "17:44"),
    ("bern", "basel"): ("05:36", "11:04", "16:34", "21:04"),
    ("porto", "lisbon"): ("08:47", "13:52", "19:38"),
}
WORDS = {
    ("bread", "French"): "pain",
    ("bread", "German"): "Brot",
    ("bread", "Spanish"): "pan",
    ("butterfly", "French"): "papillon",
    ("butterfly", "German"): "Schmetterling",
    ("butterfly", "Spanish"): "mariposa",
    ("lantern", "French"): "lanterne",
    ("lantern", "German"): "Laterne",
    ("lantern", "Spanish"): "farol",
    ("spoon", "French"): "cuillère",
    ("spoon", "German"): "Löffel",
    ("spoon", "Spanish"): "cuchara",
}
FILES = {
    "alarm.txt": "We have to get up at 6:45.",
    "contact.txt": "The contact person is Tom Okafor.",
    "country.txt": "This year we travel to Kenya.",
    "guests.txt": "12 guests are coming.",
    "lake.txt": "We go swimming in the lake Tolva.",
    "meeting.txt": "The meeting was moved to the garden.",
    "report/summary.txt": "Sales grew by 17 percent.",
    "shopping.txt": "milk, eggs, coffee",
    "todo.txt": "Call the plumber.",
    "trip.txt": "The hike is 30 km long.",
    "wifi.txt": "The password is bluefox.",
    "word.txt": "The secret word is lantern.",
}
WATTS = {"lamp": 9, "heater": 1500, "fan": 45, "radio": 12}
PRICES = {
    "apples": 1.9,
    "bread": 2.0,
    "butter": 2.4,
    "cheese": 5.0,
    "coffee": 6.5,
    "eggs": 3.2,
    "milk": 1.1,
}
WEATHER = {
    ("oslo", "today"): "rain, 4 degrees celsius",
    ("oslo", "tomorrow"): "snow, -2 degrees celsius",
    ("cairo", "today"): "sunshine, 31 degrees celsius",
    ("cairo", "tomorrow"): "wind, 28 degrees celsius",
}
ZORBLES = {"mirren": 41, "tolva": 17, "quill": 15, "ashby": 88}
FLORP = {
    ("hadlow", "wet"): 7.3,
    ("hadlow", "dry"): 3,
    ("pellerin", "wet"): 9.1,
    ("pellerin", "dry"): 0.4,
}
VEXELS = {8: "Sam Whitlock", 31: "Ida Brandt", 77: "Lucia Reyes", 102: "Tom Okafor"}


def _found(table: Mapping[Any, Any], key: Any, what: str) -> Any:
    if key not in table:
        raise ToolExecutionError(f"there is no {what}")
    return table[key]


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


# --- everyday tools ---------------------------------------------------------------------------


@tool
def country_population(country: str) -> str:
    """Get the population of a country.

    Args:
        country: The name of the country.
    """
    return f"{country} has {_found(POPULATIONS, _folded(country), country)} inhabitants."


@tool
def convert_units(value: float, from_unit: Unit, to_unit: Unit) -> str:
    """Convert a length, a weight or a temperature to another unit.

    Args:
        value: The number to convert.
        from_unit: The unit that the number is in.
        to_unit: The unit to convert it to.
    """
    if (from_unit, to_unit) == ("celsius", "fahrenheit"):
        result = value * 9 / 5 + 32
    elif (from_unit, to_unit) == ("fahrenheit", "celsius"):
        result = (value - 32) * 5 / 9
    elif (from_unit, to_unit) in FACTORS:
        result = value * FACTORS[from_unit, to_unit]
    else:
        result = value / _found(FACTORS, (to_unit, from_unit), f"way from {from_unit} to {to_unit}")
    return f"{value:g} {from_unit} is {round(result, 2):.10g} {to_unit}."


@tool
def phone_number(name: str) -> str:
    """Look up a phone number in the phone book.

    Args:
        name: The full name of the person or the place.
    """
    key = _folded(name)
    key = f"the {key}" if f"the {key}" in PHONES else key
    return f"The number of {name} is {_found(PHONES, key, f'{name} in the phone book')}."


@tool
def book_room(room: Literal["Oak", "Elm", "Birch"], day: Day, people: int = 4) -> str:
    """Book a meeting room for a day.

    Args:
        room: The name of the room.
        day: The day of the week.
        people: How many people will come.
    """
    reference = f"{room[0]}{len(day) * 100 + people}"
    return f"The {room} room is booked on {day} for {people} people. The reference is {reference}."


@tool
def stock_level(item: str, warehouse: Literal["main", "north", "south"] = "main") -> str:
    """Tell how many pieces of an item are in stock in a warehouse.

    Args:
        item: What to look for, for example hammers.
        warehouse: Which warehouse to look in.
    """
    count = _found(STOCK, (_folded(item).removesuffix("s"), warehouse), f"{item} in stock")
    return f"There are {count} {item} in the {warehouse} warehouse."


@tool
def next_train(origin: str, destination: str, after: str = "00:00") -> str:
    """Find the next train between two cities.

    Args:
        origin: The city where the train leaves.
        destination: The city where it goes.
        after: The earliest time to leave, as HH:MM.
    """
    way = _found(TRAINS, (_folded(origin), _folded(destination)), "such train")
    for time in way:
        if time >= after.strip().zfill(5):
            return f"The next train from {origin} to {destination} leaves at {time}."
    raise ToolExecutionError(f"no train leaves after {after}")


@tool
def reverse_text(text: str) -> str:
    """Write a text backwards.

    Args:
        text: The text to reverse.
    """
    return text[::-1]


@tool
def count_letter(word: str, letter: str) -> str:
    """Count how often a letter occurs in a word.

    Args:
        word: The word to look at.
        letter: The letter to count.
    """
    return f"The letter {letter} occurs {_folded(word).count(_folded(letter))} times in {word}."


@tool
def translate_word(word: str, language: Literal["French", "German", "Spanish"]) -> str:
    """Translate an English word.

    Args:
        word: The English word.
        language: The language to translate it to.
    """
    found = _found(WORDS, (_folded(word), language), f"{word} in the dictionary")
    return f"{word} in {language} is {found}."


@tool
def read_file(path: str) -> str:
    """Read a text file.

    Args:
        path: The path of the file.
    """
    text: str = _found(FILES, path.strip(), f"file {path}")
    return text


@tool
def calculate(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / and parentheses, for example 3 * (4 + 5).
    """
    value = value_of(expression)
    if value is None:
        raise ToolExecutionError(f"{expression!r} has no value")
    return f"{round(value, 6):.12g}"


@tool
def switch_device(device: Literal["lamp", "heater", "fan", "radio"], on: bool) -> str:
    """Switch a device in the house on or off.

    Args:
        device: The device to switch.
        on: true to switch it on, false to switch it off.
    """
    if on:
        return f"The {device} is now on and uses {WATTS[device]} watts."
    return f"The {device} is now off and saves {WATTS[device]} watts."


@tool
def set_alarm(hour: int, minute: int = 0) -> str:
    """Set the alarm clock.

    Args:
        hour: The hour, from 0 to 23.
        minute: The minute, from 0 to 59.
    """
    return f"Alarm number {hour + minute} is set for {hour:02}:{minute:02}."


@tool
def send_message(recipient: str, text: str) -> str:
    """Send a text message to somebody.

    Args:
        recipient: The name of the person who gets the message.
        text: What the message says.
    """
    return f"The message to {recipient} was sent. Its number is {len(recipient) * 10 + len(text)}."


@tool
def shopping_total(items: list[str]) -> str:
    """Add up the prices of the things on a shopping list.

    Args:
        items: The things to buy, one of each.
    """
    total = sum(_found(PRICES, _folded(item), f"price for {item}") for item in items)
    return f"The total is {total:.2f} euros."


@tool
def weekday(year: int, month: int, day: int) -> str:
    """Tell on which day of the week a date falls.

    Args:
        year: The year, with four digits.
        month: The month as a number, from 1 to 12.
        day: The day of the month.
    """
    try:
        return f"{date(year, month, day):%A}"
    except ValueError as error:
        raise ToolExecutionError("there is no such date") from error


@tool
def weather(city: str, day: Literal["today", "tomorrow"] = "today") -> str:
    """Get the weather forecast for a city.

    Args:
        city: The name of the city.
        day: The day of the forecast.
    """
    found = _found(WEATHER, (_folded(city), day), f"forecast for {city}")
    return f"The weather in {city} {day}: {found}."


# --- tools that nobody has seen before --------------------------------------------------------


@tool
def zorble_depth(lake: str) -> str:
    """Tell how deep the zorbles of a lake live.

    Args:
        lake: The name of the lake.
    """
    depth = _found(ZORBLES, _folded(lake).removeprefix("lake "), f"lake {lake}")
    return f"The zorbles of {lake} live {depth} fathoms deep."


@tool
def florp_index(town: str, season: Literal["wet", "dry"]) -> str:
    """Get the florp index of a town.

    Args:
        town: The name of the town.
        season: The season that it is wanted for.
    """
    index = _found(FLORP, (_folded(town), season), f"florp in {town}")
    return f"The florp index of {town} in the {season} season is {index}."


@tool
def brew_quindle(
    leaf: Literal["amber", "fern", "sable"], minutes: int, stirred: bool = False
) -> str:
    """Brew a cup of quindle and tell how strong it gets.

    Args:
        leaf: The leaf to brew it from.
        minutes: How many minutes it is brewed.
        stirred: Whether it is stirred while it brews.
    """
    strength = len(leaf) * minutes + (11 if stirred else 2)
    return f"The {leaf} quindle is ready. Its strength is {strength}."


@tool
def vexel_keeper(number: int) -> str:
    """Tell who keeps a vexel.

    Args:
        number: The number of the vexel.
    """
    return f"Vexel {number} is kept by {_found(VEXELS, number, f'vexel {number}')}."


_EVERYDAY: tuple[FunctionTool[..., Any], ...] = (
    country_population,
    convert_units,
    phone_number,
    book_room,
    stock_level,
    next_train,
    reverse_text,
    count_letter,
    translate_word,
    read_file,
    calculate,
    switch_device,
    set_alarm,
    send_message,
    shopping_total,
    weekday,
    weather,
)
_INVENTED: tuple[FunctionTool[..., Any], ...] = (
    zorble_depth,
    florp_index,
    brew_quindle,
    vexel_keeper,
)
TOOLS = {made.name: made for made in (*_EVERYDAY, *_INVENTED)}
UNSEEN = frozenset([made.name for made in _INVENTED])
"""The names of the tools that no model can have read about."""

# --- what a task is ---------------------------------------------------------------------------


class Expected(Struct, frozen=True):
    """A call that a task needs."""

    name: str
    arguments: dict[str, Any]
    also: tuple[dict[str, Any], ...] = ()
    """Other arguments that are equally right."""


class Task(Struct, frozen=True):
    """A question, the tools that are offered for it, and what a good reply does."""

    question: str
    kind: Literal["one", "two", "none"]
    tools: tuple[str, ...]
    calls: tuple[Expected, ...]
    """In this order."""
    answer: tuple[str, ...]
    """Any of them in the last message will do."""


def arguments_match(expected: Expected, given: dict[str, Any]) -> bool:
    """Whether the arguments mean what the task asks for, however they are written.

    An argument left out, or null, has its default. One that the tool does not have is wrong.
    """
    properties = TOOLS[expected.name].parameters_schema["properties"]
    defaults = {key: value["default"] for key, value in properties.items() if "default" in value}
    full = {**defaults, **_without_nulls(given)}
    for right in (expected.arguments, *expected.also):
        wanted = {**defaults, **_without_nulls(right)}
        if wanted.keys() == full.keys() and all(
            _same_expression(wanted[key], full[key])
            if (expected.name, key) == ("calculate", "expression")
            else _same(wanted[key], full[key])
            for key in wanted
        ):
            return True
    return False


def answers(task: Task, text: str) -> bool:
    """Whether the text holds one of the answers, as words and numbers of its own.

    So neither 142 nor 4.42 is taken for 42, nor "this" for "hi".
    """
    plain = _plain(text)
    readings = (plain, re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "", plain))  # 5 500 000 is one number
    return any(
        _pattern(answer).search(reading) is not None
        for answer in task.answer
        for reading in readings
    )


def value_of(expression: str) -> float | None:
    """The value of an expression of numbers, + - * / and parentheses; None if it has none."""
    text = _plain(expression).replace("×", "*").replace("÷", "/").replace("−", "-")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
        case _:
            raise ValueError("no arithmetic")


def _without_nulls(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value is not None}


def _same(wanted: Any, given: Any) -> bool:
    match wanted:
        case bool():
            text = given.strip().casefold() if isinstance(given, str) else None
            return given is wanted or text == str(wanted).casefold()
        case int() | float():
            number = _number(given)
            return number is not None and isclose(wanted, number)
        case str():
            return isinstance(given, str) and _folded(wanted) == _folded(given)
        case list():  # the one tool that takes a list does not mind its order
            if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
                return False
            return sorted(map(_folded, wanted)) == sorted(map(_folded, given))
        case _:
            raise TypeError(f"no task expects a {type(wanted).__name__}")


def _same_expression(wanted: str, given: Any) -> bool:
    right, value = value_of(wanted), value_of(str(given))
    return right is not None and value is not None and isclose(right, value)


def _number(given: Any) -> float | None:
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        return float(given)
    except (ValueError, OverflowError):
        return None


def _plain(text: str) -> str:
    """Without thousands separators, in one case, with one kind of apostrophe and space."""
    text = _folded(text).replace("’", "'")
    return re.sub(r"(?<=\d)[,_'](?=\d{3}(?!\d))", "", text)


def _pattern(answer: str) -> re.Pattern[str]:
    text = _plain(answer)
    before = r"(?<!\d)(?<!\d[.:])" if text[0].isdigit() else r"(?<!\w)"
    after = r"(?:\.0+)?(?!\d|[.:]\d)" if text[-1].isdigit() else r"(?!\w)"
    return re.compile(before + re.escape(text) + after)


# --- the tasks --------------------------------------------------------------------------------


def _one(question: str, offered: str, call: Expected, *answer: str) -> Task:
    return Task(question, "one", tuple(offered.split()), (call,), answer)


def _two(question: str, offered: str, first: Expected, then: Expected, *answer: str) -> Task:
    return Task(question, "two", tuple(offered.split()), (first, then), answer)


def _none(question: str, offered: str, *answer: str) -> Task:
    return Task(question, "none", tuple(offered.split()), (), answer)


# What was done may be told in other words than the tool's; that it was done the call shows.
_SET = (
    "alarm number", "is set", "been set", "now set", "set for", "alarm set", "I set", "have set",
    "I've set",
)  # fmt: skip
_SWITCHED = ("turned", "switched")
_SENT = ("sent", "its number is")
_GREETING = (
    "hello", "hi", "hey", "welcome", "greetings", "good", "help", "assist", "nice", "how are you",
)  # fmt: skip

ONE_STEP = (
    _one(
        "How many people live in Japan?",
        "weather country_population phone_number",
        Expected("country_population", {"country": "Japan"}),
        "124 million",
        "124,000,000",
    ),
    _one(
        "I need the population of Egypt, please.",
        "read_file next_train translate_word country_population",
        Expected("country_population", {"country": "Egypt"}),
        "112 million",
        "112,000,000",
    ),
    _one(
        "population of norway?",
        "country_population stock_level calculate set_alarm book_room",
        Expected("country_population", {"country": "Norway"}),
        "5.5 million",
        "5,500,000",
    ),
    _one(
        "Convert 10 km to miles.",
        "convert_units reverse_text weather",
        Expected("convert_units", {"value": 10, "from_unit": "km", "to_unit": "miles"}),
        "6.21",
        "6.2",
    ),
    _one(
        "My suitcase weighs 20 kg. What is that in pounds?",
        "shopping_total convert_units phone_number stock_level",
        Expected("convert_units", {"value": 20, "from_unit": "kg", "to_unit": "pounds"}),
        "44.09",
        "44.1",
    ),
    _one(
        "The oven says 212 fahrenheit. How much is that in celsius?",
        "switch_device read_file set_alarm country_population convert_units",
        Expected("convert_units", {"value": 212, "from_unit": "fahrenheit", "to_unit": "celsius"}),
        "100",
    ),
    _one(
        "What is Lucia Reyes's phone number?",
        "send_message phone_number vexel_keeper",
        Expected("phone_number", {"name": "Lucia Reyes"}),
        "555-0119",
    ),
    _one(
        "I want to call Sam Whitlock. Which number do I dial?",
        "phone_number count_letter read_file weekday",
        Expected("phone_number", {"name": "Sam Whitlock"}),
        "555-0163",
    ),
    _one(
        "Please find me the number of the dentist.",
        "calculate shopping_total next_train phone_number book_room weather",
        Expected("phone_number", {"name": "the dentist"}, ({"name": "dentist"},)),
        "555-0176",
    ),
    _one(
        "Book the Elm room on Tuesday.",
        "set_alarm book_room send_message",
        Expected("book_room", {"room": "Elm", "day": "Tuesday"}),
        "E704",
        "booked",
    ),
    _one(
        "We need the Oak room on Friday for 9 people.",
        "book_room next_train zorble_depth stock_level",
        Expected("book_room", {"room": "Oak", "day": "Friday", "people": 9}),
        "O609",
        "booked",
    ),
    _one(
        "Can you reserve Birch for Monday? There will be 15 of us.",
        "weekday weather phone_number switch_device book_room",
        Expected("book_room", {"room": "Birch", "day": "Monday", "people": 15}),
        "B615",
        "booked",
        "reserved",
    ),
    _one(
        "How many drills do we have in stock?",
        "stock_level brew_quindle calculate",
        Expected("stock_level", {"item": "drills"}, ({"item": "drill"},)),
        "71",
    ),
    _one(
        "Check how many ladders are in the south warehouse.",
        "read_file stock_level book_room count_letter",
        Expected(
            "stock_level",
            {"item": "ladders", "warehouse": "south"},
            ({"item": "ladder", "warehouse": "south"},),
        ),
        "9",
        "nine",
    ),
    _one(
        "Are there any ropes left in the north warehouse, and how many?",
        "weather translate_word florp_index set_alarm shopping_total stock_level",
        Expected(
            "stock_level",
            {"item": "ropes", "warehouse": "north"},
            ({"item": "rope", "warehouse": "north"},),
        ),
        "64",
    ),
    _one(
        "When does the first train from Bern to Basel leave?",
        "next_train weather phone_number",
        Expected("next_train", {"origin": "Bern", "destination": "Basel"}),
        "05:36",
        "5:36",
    ),
    _one(
        "I am in Leeds and want to go to York after 13:00. Which train can I take?",
        "convert_units country_population next_train book_room",
        Expected("next_train", {"origin": "Leeds", "destination": "York", "after": "13:00"}),
        "14:25",
        "2:25",
    ),
    _one(
        "Next train from Porto to Lisbon after 18:30?",
        "set_alarm send_message next_train weekday read_file",
        Expected("next_train", {"origin": "Porto", "destination": "Lisbon", "after": "18:30"}),
        "19:38",
        "7:38",
    ),
    _one(
        "Spell the word planet backwards.",
        "translate_word count_letter reverse_text",
        Expected("reverse_text", {"text": "planet"}),
        "tenalp",
    ),
    _one(
        'What do you get when you reverse "good night"?',
        "reverse_text weather vexel_keeper set_alarm",
        Expected("reverse_text", {"text": "good night"}),
        "thgin doog",
    ),
    _one(
        "How many times does the letter r appear in strawberry?",
        "reverse_text stock_level count_letter",
        Expected("count_letter", {"word": "strawberry", "letter": "r"}),
        "3",
        "three",
    ),
    _one(
        "Count the letter s in Mississippi for me.",
        "count_letter phone_number translate_word country_population",
        Expected("count_letter", {"word": "Mississippi", "letter": "s"}),
        "4",
        "four",
    ),
    _one(
        "How do you say butterfly in German?",
        "read_file translate_word convert_units",
        Expected("translate_word", {"word": "butterfly", "language": "German"}),
        "Schmetterling",
    ),
    _one(
        "Give me the Spanish word for spoon.",
        "shopping_total reverse_text switch_device translate_word calculate",
        Expected("translate_word", {"word": "spoon", "language": "Spanish"}),
        "cuchara",
    ),
    _one(
        "Translate bread to French.",
        "translate_word shopping_total next_train weather",
        Expected("translate_word", {"word": "bread", "language": "French"}),
        "pain",
    ),
    _one(
        "What does the file meeting.txt say?",
        "book_room weekday read_file",
        Expected("read_file", {"path": "meeting.txt"}),
        "garden",
    ),
    _one(
        "Open report/summary.txt and tell me how much sales grew.",
        "calculate read_file stock_level convert_units",
        Expected("read_file", {"path": "report/summary.txt"}),
        "17",
    ),
    _one(
        "Who do I have to call? It is written in todo.txt.",
        "send_message read_file weather brew_quindle set_alarm",
        Expected("read_file", {"path": "todo.txt"}),
        "plumber",
    ),
    _one(
        "What is 37 + 48?",
        "weekday calculate count_letter",
        Expected("calculate", {"expression": "37 + 48"}),
        "85",
    ),
    _one(
        "Work out 12 * (7 + 3).",
        "calculate convert_units shopping_total country_population",
        Expected("calculate", {"expression": "12 * (7 + 3)"}),
        "120",
    ),
    _one(
        "I have to divide 91 by 7. What comes out?",
        "zorble_depth phone_number stock_level calculate read_file",
        Expected("calculate", {"expression": "91 / 7"}),
        "13",
    ),
    _one(
        "Turn on the fan.",
        "set_alarm weather switch_device",
        Expected("switch_device", {"device": "fan", "on": True}),
        "45 watts",
        *_SWITCHED,
        "is on",
        "now on",
    ),
    _one(
        "It is too warm in here, please switch the heater off.",
        "switch_device convert_units weather translate_word",
        Expected("switch_device", {"device": "heater", "on": False}),
        "1500 watts",
        *_SWITCHED,
        "is off",
        "now off",
    ),
    _one(
        "Could you put the radio on?",
        "phone_number next_train send_message switch_device florp_index",
        Expected("switch_device", {"device": "radio", "on": True}),
        "12 watts",
        *_SWITCHED,
        "is on",
        "now on",
    ),
    _one(
        "Set an alarm for 7:30.",
        "next_train set_alarm book_room",
        Expected("set_alarm", {"hour": 7, "minute": 30}),
        *_SET,
    ),
    _one(
        "Wake me up at 5 in the morning.",
        "switch_device weather set_alarm send_message",
        Expected("set_alarm", {"hour": 5}),
        *_SET,
        "wake you",
    ),
    _one(
        "I need an alarm at 21:15 tonight.",
        "weekday reverse_text calculate read_file set_alarm",
        Expected("set_alarm", {"hour": 21, "minute": 15}),
        *_SET,
    ),
    _one(
        'Send Anna the message "On my way".',
        "send_message phone_number translate_word",
        Expected("send_message", {"recipient": "Anna", "text": "On my way"}),
        *_SENT,
    ),
    _one(
        'Text Peter: "Dinner is ready"',
        "shopping_total read_file send_message next_train",
        Expected("send_message", {"recipient": "Peter", "text": "Dinner is ready"}),
        *_SENT,
    ),
    _one(
        "What do bread, milk and butter cost together?",
        "stock_level shopping_total translate_word",
        Expected("shopping_total", {"items": ["bread", "milk", "butter"]}),
        "5.50",
        "5.5",
    ),
    _one(
        "I am buying cheese and apples. How much will I pay?",
        "shopping_total phone_number count_letter convert_units",
        Expected("shopping_total", {"items": ["cheese", "apples"]}),
        "6.90",
        "6.9",
    ),
    _one(
        "What day of the week was 20 July 1969?",
        "set_alarm weekday book_room",
        Expected("weekday", {"year": 1969, "month": 7, "day": 20}),
        "Sunday",
    ),
    _one(
        "My sister was born on 9 November 1989. Which weekday was that?",
        "country_population calculate weekday weather",
        Expected("weekday", {"year": 1989, "month": 11, "day": 9}),
        "Thursday",
    ),
    _one(
        "What's the weather like in Cairo today?",
        "country_population weather next_train",
        Expected("weather", {"city": "Cairo"}),
        "sunshine",
        "sunny",
        "31",
    ),
    _one(
        "What will the weather be in Oslo tomorrow?",
        "switch_device zorble_depth weather weekday",
        Expected("weather", {"city": "Oslo", "day": "tomorrow"}),
        "snow",
        "-2",
    ),
    _one(
        "How deep do the zorbles live in Mirren?",
        "country_population zorble_depth weather",
        Expected("zorble_depth", {"lake": "Mirren"}, ({"lake": "Lake Mirren"},)),
        "41",
    ),
    _one(
        "Tell me the zorble depth of Lake Ashby.",
        "vexel_keeper florp_index zorble_depth convert_units",
        Expected("zorble_depth", {"lake": "Ashby"}, ({"lake": "Lake Ashby"},)),
        "88",
    ),
    _one(
        "What is the florp index of Pellerin in the wet season?",
        "florp_index weather brew_quindle",
        Expected("florp_index", {"town": "Pellerin", "season": "wet"}),
        "9.1",
    ),
    _one(
        "I'm going to Hadlow when it's the wet season. How high is the florp index there?",
        "next_train zorble_depth weather florp_index book_room",
        Expected("florp_index", {"town": "Hadlow", "season": "wet"}),
        "7.3",
    ),
    _one(
        "Brew a quindle from fern for 6 minutes. How strong is it?",
        "shopping_total brew_quindle set_alarm",
        Expected("brew_quindle", {"leaf": "fern", "minutes": 6}),
        "26",
    ),
    _one(
        "Make me a stirred amber quindle, 4 minutes, and tell me its strength.",
        "switch_device set_alarm stock_level brew_quindle",
        Expected("brew_quindle", {"leaf": "amber", "minutes": 4, "stirred": True}),
        "31",
    ),
    _one(
        "Who is the keeper of vexel 77?",
        "vexel_keeper phone_number florp_index zorble_depth",
        Expected("vexel_keeper", {"number": 77}),
        "Lucia Reyes",
        "Lucia",
    ),
    _one(
        "Somebody looks after vexel number 102. What's the name?",
        "read_file send_message stock_level count_letter phone_number vexel_keeper",
        Expected("vexel_keeper", {"number": 102}),
        "Tom Okafor",
        "Okafor",
    ),
)

TWO_STEPS = (
    _two(
        "Read guests.txt and multiply the number of guests by 4.",
        "read_file calculate phone_number",
        Expected("read_file", {"path": "guests.txt"}),
        Expected("calculate", {"expression": "12 * 4"}),
        "48",
    ),
    _two(
        "What is the population of the country that country.txt names?",
        "weather country_population read_file translate_word",
        Expected("read_file", {"path": "country.txt"}),
        Expected("country_population", {"country": "Kenya"}),
        "55 million",
        "55,000,000",
    ),
    _two(
        "Find out who keeps vexel 31, then give me that person's phone number.",
        "phone_number vexel_keeper set_alarm",
        Expected("vexel_keeper", {"number": 31}),
        Expected("phone_number", {"name": "Ida Brandt"}),
        "555-0142",
    ),
    _two(
        "How many miles is the hike in trip.txt?",
        "next_train convert_units stock_level read_file",
        Expected("read_file", {"path": "trip.txt"}),
        Expected("convert_units", {"value": 30, "from_unit": "km", "to_unit": "miles"}),
        "18.64",
        "18.6",
    ),
    _two(
        "The contact person is in contact.txt. What is their phone number?",
        "read_file send_message phone_number book_room weekday",
        Expected("read_file", {"path": "contact.txt"}),
        Expected("phone_number", {"name": "Tom Okafor"}),
        "555-0187",
    ),
    _two(
        "See which lake is in lake.txt and tell me how deep its zorbles live.",
        "florp_index read_file zorble_depth",
        Expected("read_file", {"path": "lake.txt"}),
        Expected("zorble_depth", {"lake": "Tolva"}, ({"lake": "Lake Tolva"},)),
        "17",
    ),
    _two(
        "Translate the secret word in word.txt to German.",
        "translate_word count_letter read_file weather",
        Expected("read_file", {"path": "word.txt"}),
        Expected("translate_word", {"word": "lantern", "language": "German"}),
        "Laterne",
    ),
    _two(
        "Divide the number of hammers in the north warehouse by 3.",
        "calculate stock_level shopping_total",
        Expected(
            "stock_level",
            {"item": "hammers", "warehouse": "north"},
            ({"item": "hammer", "warehouse": "north"},),
        ),
        Expected("calculate", {"expression": "36 / 3"}),
        "12",
        "twelve",
    ),
    _two(
        "Set the alarm for the time written in alarm.txt.",
        "set_alarm weekday next_train read_file",
        Expected("read_file", {"path": "alarm.txt"}),
        Expected("set_alarm", {"hour": 6, "minute": 45}),
        *_SET,
    ),
    _two(
        "Read the password in wifi.txt and write it backwards.",
        "reverse_text switch_device read_file",
        Expected("read_file", {"path": "wifi.txt"}),
        Expected("reverse_text", {"text": "bluefox"}),
        "xofeulb",
    ),
    _two(
        "Translate butterfly to Spanish, then count the letter a in the Spanish word.",
        "calculate translate_word reverse_text count_letter",
        Expected("translate_word", {"word": "butterfly", "language": "Spanish"}),
        Expected("count_letter", {"word": "mariposa", "letter": "a"}),
        "2",
        "two",
        "twice",
    ),
    _two(
        "Add up bread and cheese, then multiply the total by 2.",
        "shopping_total calculate country_population",
        Expected("shopping_total", {"items": ["bread", "cheese"]}),
        Expected("calculate", {"expression": "7 * 2"}),
        "14",
    ),
    _two(
        "How warm is it in Oslo today, in fahrenheit?",
        "next_train weather florp_index convert_units book_room",
        Expected("weather", {"city": "Oslo"}),
        Expected("convert_units", {"value": 4, "from_unit": "celsius", "to_unit": "fahrenheit"}),
        "39.2",
    ),
    _two(
        "Take the zorble depth of Lake Quill and add 9 to it.",
        "zorble_depth weekday calculate",
        Expected("zorble_depth", {"lake": "Quill"}, ({"lake": "Lake Quill"},)),
        Expected("calculate", {"expression": "15 + 9"}),
        "24",
    ),
    _two(
        "What is 10 times the florp index of Hadlow in the dry season?",
        "weather calculate phone_number florp_index",
        Expected("florp_index", {"town": "Hadlow", "season": "dry"}),
        Expected("calculate", {"expression": "10 * 3"}),
        "30",
        "thirty",
    ),
    _two(
        "Look in guests.txt how many people come, and book the Birch room on Friday for them.",
        "stock_level book_room set_alarm read_file",
        Expected("read_file", {"path": "guests.txt"}),
        Expected("book_room", {"room": "Birch", "day": "Friday", "people": 12}),
        "B612",
        "booked",
    ),
    _two(
        'Find the keeper of vexel 8 and send them the message "Come home".',
        "vexel_keeper read_file zorble_depth send_message brew_quindle",
        Expected("vexel_keeper", {"number": 8}),
        Expected("send_message", {"recipient": "Sam Whitlock", "text": "Come home"}),
        *_SENT,
    ),
    _two(
        "How much will everything on the list in shopping.txt cost?",
        "read_file stock_level shopping_total",
        Expected("read_file", {"path": "shopping.txt"}),
        Expected("shopping_total", {"items": ["milk", "eggs", "coffee"]}),
        "10.80",
        "10.8",
    ),
)

NO_TOOL = (
    _none("Hello!", "weather read_file calculate", *_GREETING),
    _none("Good morning, how are you?", "set_alarm phone_number stock_level", *_GREETING, "well",
          "fine", "great", "morning"),
    _none("Thanks a lot, that helped me.", "send_message book_room next_train translate_word",
          "welcome", "glad", "pleasure", "happy", "no problem", "anytime", "any time", "good",
          "great", "thank you"),
    _none("Bye, see you later!", "switch_device calculate zorble_depth", "bye", "goodbye",
          "see you", "later", "take care", "good", "soon", "nice", "great"),
    _none("What is the capital of France?", "stock_level read_file set_alarm book_room", "Paris"),
    _none("Which colour is the sky on a clear day?", "calculate phone_number switch_device",
          "blue"),
    _none("How many legs does a spider have?", "next_train shopping_total vexel_keeper set_alarm",
          "8", "eight"),
    _none("Which planet do we live on?", "convert_units florp_index read_file", "Earth"),
    _none("Who wrote Romeo and Juliet?", "weekday stock_level weather phone_number calculate",
          "Shakespeare"),
    _none("What do bees make?", "send_message convert_units book_room", "honey", "wax"),
    _none("Please say the word banana.", "weather next_train calculate", "banana"),
    _none('Repeat after me: "the river is wide"', "book_room switch_device weekday stock_level",
          "the river is wide"),
    _none("What is the opposite of hot?", "read_file phone_number next_train", "cold", "cool"),
    _none("Which animal says meow?", "country_population brew_quindle set_alarm convert_units",
          "cat", "cats", "kitten", "kittens"),
    _none("In one word: is ice cold or warm?", "stock_level book_room vexel_keeper", "cold"),
)  # fmt: skip

TASKS = (*ONE_STEP, *TWO_STEPS, *NO_TOOL)

# --- what is wrong with the tasks -------------------------------------------------------------


def problems(task: Task) -> Iterator[str]:
    """Where a task contradicts the tools, or gives its answer away."""
    if len(task.question.split()) >= 25:
        yield "the question is long"
    if not 3 <= len(set(task.tools)) == len(task.tools) <= 6 or not set(task.tools) <= set(TOOLS):
        yield "offers the wrong tools"
    if len(task.calls) != {"one": 1, "two": 2, "none": 0}[task.kind]:
        yield "expects the wrong number of calls"
    said = task.question
    for number, call in enumerate(task.calls, 1):
        if call.name not in task.tools:
            yield f"does not offer {call.name}"
        if answers(task, said):
            yield f"the answer is known before call {number}"
        results = list(_results(call))
        if number == len(task.calls) and not all(answers(task, result) for result in results):
            yield f"the answer is not in {results}"
        said += f"\n{results[0]}"


def _results(call: Expected) -> Iterator[str]:
    """What the tool gives for each form of the arguments."""
    made = TOOLS[call.name]
    for arguments in (call.arguments, *call.also):
        made.validate(arguments)
        yield made(**arguments)


if __name__ == "__main__":
    found = [f"{task.question} {problem}" for task in TASKS for problem in problems(task)]
    for line in found:
        print(line)
    print(f"{len(TASKS)} tasks, {len(found)} problems")
    raise SystemExit(bool(found))
