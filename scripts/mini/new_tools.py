"""Tools held out from training, in the format of domains.py: known terms in unseen combinations.

They have no training requests.
"""

from __future__ import annotations

TOOLS = {
    "hotel": (
        (
            "find_hotel",
            "Find a hotel.",
            "city=city:name",
            (),
            ("find a hotel in [{city}]", "look for a hotel in [{city}]", "see a hotel in [{city}]"),
        ),
        (
            "stop_hotel",
            "Cancel a hotel.",
            "hotel=number:code",
            (),
            ("cancel [hotel {hotel}]", "have [hotel {hotel}] cancelled", "stop and cancel [hotel {hotel}]"),
        ),
        (
            "rate_hotel",
            "Rate a hotel.",
            "hotel=hotel:name stars=stars:float",
            (),
            ("rate the hotel {hotel} with {stars} stars", "give {stars} stars to the hotel {hotel}"),
        ),
    ),
    "cars": (
        (
            "buy_car",
            "Buy a car.",
            "car=car:title sum=sum:sum",
            (),
            ("buy the car {car} for {sum}", "get the car {car} for {sum} in money"),
        ),
        ("lock_car", "Lock a car.", "car=car:code", (), ("lock [car {car}]", "have [car {car}] locked")),
        (
            "clean_car",
            "Clean a car.",
            "car=car:code",
            (),
            ("clean [car {car}]", "have [car {car}] cleaned", "start to clean [car {car}]"),
        ),
    ),
    "kitchen": (
        (
            "save_recipe",
            "Save a recipe.",
            "dish=dish:title",
            (),
            ("save the recipe of [{dish}]", "save a recipe for [{dish}]", "save my recipe of [{dish}]"),
        ),
        (
            "rate_meal",
            "Rate a meal.",
            "dish=dish:title stars=stars:float",
            (),
            ("rate the meal {dish} with {stars} stars", "give {stars} stars to the meal {dish}"),
        ),
    ),
    "club": (
        (
            "add_person",
            "Add a person.",
            "who=person:name team=team:name",
            (),
            ("add the person {who} to team {team}", "add to team {team} the person {who}"),
        ),
        (
            "book_artist",
            "Book an artist.",
            "who=artist:name at=time:time",
            (),
            ("book the artist {who} for {at}", "book for {at} the artist {who}"),
        ),
        ("find_team", "Find a team.", "city=city:name", (), ("find a team in [{city}]", "see a team in [{city}]")),
    ),
    "alarms": (
        (
            "set_alert",
            "Switch an alert.",
            "alert=alert:name on=on:on_off",
            (),
            ("switch {on} the alert {alert}", "turn {on} the alert {alert}", "turn the alert {alert} {on}"),
        ),
        (
            "log_heating",
            "Log the heating.",
            "room=room:name",
            (),
            ("log the heating in [room {room}]", "add the heating of [room {room}] to the log"),
        ),
    ),
}

LOOKUPS = {
    "hotel": (("my_hotel", "My hotel.", "my hotel", "code", "stop_hotel"),),
    "cars": (("my_car", "My car.", "my car", "code", "lock_car clean_car"),),
    "kitchen": (("top_dish", "Top dish.", "the top dish", "title", "save_recipe"),),
    "alarms": (("top_room", "Top room.", "the top room", "name", "log_heating"),),
}
