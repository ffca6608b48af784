"""The tools seen in training, by domain.

A row of TOOLS is (name, description, parameters, training requests, held-out requests). Parameters are written as
"name=description:kind ..". In a request {name} is a value slot, and [..] the part that a dialogue may replace by a
reference ("the weather in [Kala]", "the weather in [my city]"). Held-out requests recombine known terms.

A row of LOOKUPS is (name, description, the user's reference to the value, kind, tools that accept the value).
"""

from __future__ import annotations

TOOLS = {
    "weather": (
        (
            "get_weather",
            "City weather.",
            "city=place:name",
            ("check the weather in [{city}]", "get the weather for [{city}]", "ask for the weather in [{city}]"),
            ("find the weather in [{city}]", "get weather for [{city}]"),
        ),
        (
            "get_rain",
            "Rain in a city.",
            "city=place:name",
            ("check the rain in [{city}]", "get the rain for [{city}]", "ask about the rain in [{city}]"),
            ("find the rain in [{city}]", "ask for the rain for [{city}]"),
        ),
        (
            "get_wind",
            "Wind in a city.",
            "city=place:name",
            ("check the wind in [{city}]", "get the wind for [{city}]", "ask about the wind in [{city}]"),
            ("find the wind in [{city}]", "ask for the wind for [{city}]"),
        ),
        (
            "heat_alert",
            "Alert on heat.",
            "city=place:name heat=limit:int",
            (
                "set a heat alert in {city} at {heat}",
                "set an alert at {heat} heat for {city}",
                "have an alert at {heat} heat in {city}",
            ),
            ("set a heat alert of {heat} for {city}", "have a heat alert on {heat} in {city}"),
        ),
    ),
    "travel": (
        (
            "find_flight",
            "Find a flight.",
            "to=city:name day=day:int",
            (
                "find a flight to {to} on day {day}",
                "find a flight on day {day} to {to}",
                "get a flight to {to} for day {day}",
            ),
            ("find the flight to {to} for day {day}", "get the flight on day {day} to {to}"),
        ),
        (
            "find_train",
            "Find a train.",
            "to=city:name at=time:time",
            ("find a train to {to} at {at}", "find the {at} train to {to}", "get a train at {at} to {to}"),
            ("get the {at} train to {to}", "find a train at {at} to {to}"),
        ),
        (
            "book_hotel",
            "Book a hotel.",
            "city=city:name days=nights:int",
            (
                "book a hotel in {city} for {days} nights",
                "book {days} nights in a hotel in {city}",
                "get a hotel in {city} for {days} days",
            ),
            ("book a hotel for {days} nights in {city}", "get {days} days in a hotel in {city}"),
        ),
        (
            "rent_car",
            "Rent a car.",
            "city=city:name",
            ("rent a car in [{city}]", "find a car to rent in [{city}]", "get a car in [{city}]"),
            ("have a car rented in [{city}]", "find a car in [{city}] to rent"),
        ),
    ),
    "food": (
        (
            "book_table",
            "Book a table.",
            "place=place:name at=time:time",
            ("book a table at {place} for {at}", "book a table for {at} at {place}", "get a {at} table at {place}"),
            ("get a table for {at} at {place}", "book the {at} table at {place}"),
        ),
        (
            "find_recipe",
            "Find a recipe.",
            "dish=dish:title",
            ("find a recipe for [{dish}]", "find the recipe of [{dish}]", "get a recipe for [{dish}]"),
            ("find the recipe for [{dish}]", "get a recipe of [{dish}]"),
        ),
        (
            "order_meal",
            "Order a meal.",
            "dish=dish:title n=count:int",
            ("order {n} meals of {dish}", "order the meal {dish} {n} times", "get {n} {dish} meals"),
            ("order {n} {dish} meals", "get {n} meals of {dish}"),
        ),
        (
            "rate_place",
            "Rate a place.",
            "place=place:name stars=stars:float",
            (
                "rate {place} with {stars} stars",
                "give {stars} stars to {place}",
                "rate the place {place} at {stars} stars",
            ),
            ("give the place {place} {stars} stars", "rate {place} at {stars} stars"),
        ),
    ),
    "music": (
        (
            "play_song",
            "Play a song.",
            "song=title:title",
            ("play [the song {song}]", "play [song {song}]", "start [the song {song}]"),
            ("start [song {song}]", "start to play [the song {song}]"),
        ),
        (
            "play_artist",
            "Play an artist.",
            "who=artist:name",
            ("play the artist [{who}]", "play music by [{who}]", "start music by the artist [{who}]"),
            ("start music by [{who}]", "play music by the artist [{who}]"),
        ),
        (
            "set_volume",
            "Set the volume.",
            "level=level:int",
            ("set the volume to {level}", "turn the volume to {level}", "make the volume {level}"),
            ("turn volume to {level}", "set the volume at {level}"),
        ),
        (
            "save_song",
            "Save a song.",
            "song=title:title list=list:name",
            ("save {song} to list {list}", "save the song {song} in {list}", "save to list {list} the song {song}"),
            ("save the song {song} to {list}", "save to {list} the song {song}"),
        ),
    ),
    "home": (
        (
            "set_lamp",
            "Switch a lamp.",
            "lamp=lamp:name on=on:on_off",
            ("switch {on} the lamp {lamp}", "turn lamp {lamp} {on}", "switch lamp {lamp} {on}"),
            ("turn {on} the lamp {lamp}", "switch the lamp {lamp} {on}"),
        ),
        (
            "set_door",
            "Move a door.",
            "door=door:name open=open:open_close",
            ("{open} the door {door}", "{open} door {door}", "go and {open} the door {door}"),
            ("go and {open} door {door}", "go {open} the door {door}"),
        ),
        (
            "set_heating",
            "Set the heating.",
            "room=room:name heat=level:float",
            ("set the heating in {room} to {heat}", "heat {room} to {heat}", "set heating to {heat} in {room}"),
            ("set the heating to {heat} in {room}", "heat the room {room} to {heat}"),
        ),
        (
            "clean_room",
            "Clean a room.",
            "room=room:name",
            ("clean [the room {room}]", "have [room {room}] cleaned", "start to clean [{room}]"),
            ("clean [{room}]", "start to clean [the room {room}]"),
        ),
    ),
    "calendar": (
        (
            "add_meeting",
            "Add a meeting.",
            "who=person:name at=time:time",
            ("add a meeting with {who} at {at}", "add a {at} meeting with {who}", "plan a meeting at {at} with {who}"),
            ("add a meeting at {at} with {who}", "plan a {at} meeting with {who}"),
        ),
        (
            "end_meeting",
            "Cancel a meeting.",
            "who=person:name",
            ("cancel the meeting with [{who}]", "cancel my meeting with [{who}]", "drop the meeting with [{who}]"),
            ("drop my meeting with [{who}]", "cancel a meeting with [{who}]"),
        ),
        (
            "set_alarm",
            "Set an alarm.",
            "at=time:time",
            ("set an alarm for [{at}]", "set the alarm at [{at}]", "have an alarm at [{at}]"),
            ("set an alarm at [{at}]", "start the alarm at [{at}]"),
        ),
        (
            "set_timer",
            "Set a timer.",
            "min=minutes:int",
            ("set a timer for {min} minutes", "start a {min} minute timer", "start a timer of {min} minutes"),
            ("set a {min} minute timer", "start the timer for {min} minutes"),
        ),
    ),
    "bank": (
        (
            "send_money",
            "Send money.",
            "to=person:name sum=sum:sum",
            ("send {sum} to {to}", "send {to} money, {sum} in all", "send money to {to}, {sum} in all"),
            ("send money, {sum} in all, to {to}", "send {to} {sum} in money"),
        ),
        (
            "pay_bill",
            "Pay a bill.",
            "bill=number:code",
            ("pay [bill {bill}]", "pay the money for [bill {bill}]", "have [bill {bill}] paid"),
            ("pay for [bill {bill}]", "have the money for [bill {bill}] paid"),
        ),
        (
            "get_balance",
            "Account balance.",
            "of=account:code",
            (
                "get the balance of [account {of}]",
                "check the balance of [account {of}]",
                "ask for the balance on [account {of}]",
            ),
            ("check the balance on [account {of}]", "find the balance of [account {of}]"),
        ),
        (
            "lock_card",
            "Lock a card.",
            "card=card:code",
            ("lock [card {card}]", "block and lock [card {card}]", "have [card {card}] locked"),
            ("block [card {card}]", "have [card {card}] blocked and locked"),
        ),
    ),
    "mail": (
        (
            "send_mail",
            "Send a mail.",
            "to=person:name about=subject:title",
            ("send a mail to {to} about {about}", "mail {to} about {about}", "send {to} a mail on {about}"),
            ("send a mail about {about} to {to}", "mail {to} on {about}"),
        ),
        (
            "find_mail",
            "Find mails.",
            "by=person:name",
            ("find mails by [{by}]", "find the mail from [{by}]", "see mails from [{by}]"),
            ("look for mails from [{by}]", "see the mail by [{by}]"),
        ),
        (
            "call_person",
            "Call a person.",
            "who=person:name",
            ("call [{who}]", "give [{who}] a call", "start a call with [{who}]"),
            ("start to call [{who}]", "make a call to [{who}]"),
        ),
        (
            "block_person",
            "Block a person.",
            "who=person:name",
            ("block [{who}]", "block all mails from [{who}]", "have [{who}] blocked"),
            ("block mails by [{who}]", "block all from [{who}]"),
        ),
    ),
    "shop": (
        (
            "buy_item",
            "Buy an item.",
            "item=item:title n=count:int",
            ("buy {n} of {item}", "buy the item {item}, {n} of it", "buy {n} items of {item}"),
            ("buy {n} of the item {item}", "buy the item {item}, {n} in all"),
        ),
        (
            "track_order",
            "Track an order.",
            "order=number:code",
            ("track [order {order}]", "track the way of [order {order}]", "follow [order {order}]"),
            ("start to follow [order {order}]", "start to track [order {order}]"),
        ),
        (
            "stop_order",
            "Cancel an order.",
            "order=number:code",
            ("cancel [order {order}]", "have [order {order}] cancelled", "stop and cancel [order {order}]"),
            ("stop [order {order}]", "have [order {order}] stopped and cancelled"),
        ),
        (
            "find_price",
            "Price of an item.",
            "item=item:title",
            ("find the price of [{item}]", "check the price of [{item}]", "ask for the price of [the item {item}]"),
            ("ask for the price of [{item}]", "find the price for [the item {item}]"),
        ),
    ),
    "maths": (
        (
            "add_numbers",
            "Add numbers.",
            "a=first:int b=second:int",
            ("add {a} and {b}", "add {b} to {a}", "get the sum of {a} and {b}"),
            ("add the numbers {a} and {b}", "ask for the sum of {a} and {b}"),
        ),
        (
            "multiply",
            "Multiply numbers.",
            "a=first:int b=second:int",
            ("multiply {a} by {b}", "multiply {a} and {b}", "multiply by {b} the number {a}"),
            ("multiply the number {a} by {b}", "multiply the numbers {a} and {b}"),
        ),
        (
            "get_root",
            "Root of a number.",
            "x=number:sum",
            ("get the root of {x}", "find the root of {x}", "ask for the root of {x}"),
            ("find root of {x}", "get the root of the number {x}"),
        ),
        (
            "round_up",
            "Round a number.",
            "x=number:float",
            ("round up {x}", "round {x}", "round {x} up"),
            ("round the number {x} up", "round up the number {x}"),
        ),
    ),
    "sport": (
        (
            "log_run",
            "Log a run.",
            "km=km:float",
            ("log a run of {km} km", "log my run of {km} km", "add a {km} km run to the log"),
            ("log my {km} km run", "add a run of {km} km to the log"),
        ),
        (
            "log_weight",
            "Log the weight.",
            "kg=kg:float",
            ("log a weight of {kg} kg", "log my weight at {kg} kg", "add {kg} kg of weight to the log"),
            ("log my weight of {kg} kg", "add a weight of {kg} kg to the log"),
        ),
        (
            "join_team",
            "Join a team.",
            "team=team:name",
            ("join [the team {team}]", "join [team {team}]", "join up with [the team of {team}]"),
            ("join up with [team {team}]", "join [the team of {team}]"),
        ),
        (
            "get_score",
            "Score of a team.",
            "team=team:name",
            ("get the score of [{team}]", "ask for the score of [{team}]", "check the score of [the team {team}]"),
            ("check the score of [{team}]", "get the score of [the team {team}]"),
        ),
    ),
    "library": (
        (
            "find_book",
            "Find a book.",
            "book=title:title",
            ("find [the book {book}]", "search for [the book {book}]", "look for [the book {book}]"),
            ("find [book {book}]", "see [the book {book}]"),
        ),
        (
            "borrow_book",
            "Borrow a book.",
            "book=title:title days=days:int",
            (
                "borrow {book} for {days} days",
                "borrow the book {book} for {days} days",
                "get {book} to borrow for {days} days",
            ),
            ("borrow for {days} days the book {book}", "get the book {book} to borrow for {days} days"),
        ),
        (
            "return_book",
            "Return a book.",
            "book=title:title",
            ("return [the book {book}]", "return [book {book}]", "give back and return [{book}]"),
            ("give back [the book {book}]", "return [{book}]"),
        ),
        (
            "find_author",
            "Books by an author.",
            "who=author:name",
            ("find books by the author [{who}]", "see books by [{who}]", "find the books of author [{who}]"),
            ("see the books of author [{who}]", "find books by [{who}]"),
        ),
    ),
}

LOOKUPS = {
    "weather": (("my_city", "My city.", "my city", "name", "get_weather get_rain get_wind rent_car"),),
    "food": (("my_dish", "My dish.", "my dish", "title", "find_recipe"),),
    "music": (("top_song", "Top song.", "the top song", "title", "play_song"),),
    "home": (("my_room", "My room.", "my room", "name", "clean_room"),),
    "calendar": (
        ("my_boss", "My boss.", "my boss", "name", "end_meeting call_person find_mail block_person"),
        ("sunrise", "Sunrise time.", "sunrise", "time", "set_alarm"),
    ),
    "bank": (
        ("new_bill", "New bill.", "my new bill", "code", "pay_bill"),
        ("my_card", "My card.", "my card", "code", "lock_card"),
    ),
    "shop": (("my_order", "My order.", "my order", "code", "track_order stop_order"),),
    "sport": (("my_team", "My team.", "my team", "name", "join_team get_score"),),
    "library": (("my_book", "My book.", "my book", "title", "find_book return_book find_price"),),
}
