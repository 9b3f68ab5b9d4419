# SPDX-License-Identifier: Apache-2.0
"""Texts of our own to measure a package with; no build ever sees them, so none can be fitted to them.

English prose, Chinese prose and a chat, since those are what the server is for.
"""

from collections.abc import Mapping

EVALUATION: Mapping[str, str] = {
    "english": (
        "Nobody in the village could say who had built the bridge. It stood on four stone feet in the river, a "
        "little crooked, and every spring the flood took a piece of it away. The school teacher, who liked to "
        "measure things, found that it had lost eleven centimetres in nine years. He wrote to the district "
        "office and asked for cement. The office answered after five months that the bridge did not exist, "
        "because it was on no map. So the people mended it themselves. The carpenter brought beams, the "
        "fishermen carried sand, and the children were told to count the stones, which they did until they "
        "reached 318 and began to quarrel. In the autumn a van with two engineers stopped in front of it. They "
        "looked at their map, they looked at the bridge, and then they drove across it very slowly, as one "
        "does over something that is not there. The teacher smiled and wrote the date into his book."
    ),
    "chinese": (
        "村里没有人说得出那座桥是谁建的。它有四只石脚站在河里,有一点歪,每年春天的洪水都要带走它的一块。"
        "喜欢量东西的老师发现,九年里它矮了十一厘米。他写信给县里,请求拨一些水泥。五个月以后,"
        "办公室回信说,这座桥并不存在,因为地图上没有它。于是大家自己动手修桥。木匠扛来了梁,"
        "渔夫挑来了沙子,孩子们负责数石头,一直数到三百一十八块,然后就吵了起来。秋天,"
        "一辆车停在桥前,两位工程师看看地图,又看看桥,最后非常慢地开了过去。老师笑了,把日期记在本子上。"
    ),
    "chat": (
        "User: Do you have a table for six people on Saturday evening?\n"
        "Assistant: We have one at half past six and one at a quarter to nine. The early one is by the window, "
        "the late one is in the garden if it does not rain. Which do you prefer?\n"
        "User: The early one, please. Two of us do not eat meat. Is that a problem?\n"
        "Assistant: Not at all. The kitchen has a menu without meat, with seven dishes to choose from. I can "
        "also note allergies, so that the waiter knows before you arrive.\n"
        "User: One guest cannot eat peanuts.\n"
        "Assistant: I have written down: Saturday, 6.30 p.m., six people, two without meat, one with no "
        "peanuts. May I have a name and a telephone number for the booking?"
    ),
}
