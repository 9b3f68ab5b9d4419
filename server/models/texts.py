# SPDX-License-Identifier: Apache-2.0
"""Texts of our own: one half to calibrate on, the other half to measure with, so neither flatters the other.

English prose, Chinese prose and a chat, since those are what the server is for.
"""

from collections.abc import Mapping

CALIBRATION: Mapping[str, str] = {
    "english": (
        "The harbour wakes before the city does. At five in the morning the first ferry is already warming its "
        "engine, and the man who sells tickets counts his coins under a yellow lamp. A woman carries two "
        "baskets of greens over the gangway; the sailors greet her by name. When the rope is loosened the "
        "water turns white for a moment, then black again. Across the channel the windows of the towers catch "
        "the sun one after another, from the top down, like a slow clock. By seven o'clock 1,200 people have "
        "crossed, and nobody remembers the quiet. The price of the crossing has risen only three times in "
        "forty years: from 20 cents to 50, then to 1.70, and at last to 3.20 on weekends. In the evening the "
        "same boats bring everybody home. Some sleep, some read the news on their telephones, and a few lean "
        "on the rail and look at the lights, although they have seen them a thousand times."
    ),
    "chinese": (
        "清晨五点,海港比城市醒得更早。第一班渡轮已经在预热发动机,卖票的人在黄色的灯下数着零钱。"
        "一位妇女挑着两筐青菜走过跳板,水手们都叫得出她的名字。缆绳松开的一刻,水面先是翻起白浪,"
        "随后又恢复了黑色。对岸高楼的窗户一扇接一扇地映出阳光,从上到下,好像一座走得很慢的钟。"
        "到了七点,已经有一千两百人过了海,谁也不记得刚才的安静。四十年来,船票只涨过三次价。"
        "晚上,同样的船把大家送回家。有人睡着了,有人看手机上的新闻,也有人靠着栏杆看灯火。"
    ),
    "chat": (
        "User: My parcel has not arrived and the tracking page shows nothing. What can I do?\n"
        "Assistant: I am sorry about the delay. Please send me the order number, then I can ask the courier. "
        "Most parcels that show no movement are waiting at customs and arrive within three working days.\n"
        "User: It is 40718-B. I need it before Friday, it is a birthday present.\n"
        "Assistant: Thank you. I have marked the order as urgent. If it is not with you by Thursday evening, "
        "we will send a second one by express at no cost, and you may keep both.\n"
        "User: That is kind. Can I change the address as well?\n"
        "Assistant: Yes, as long as the parcel has not left the warehouse. Which address should we use?"
    ),
}

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
